# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_in1k.py'

model = dict(backbone=dict(arch='tiny'))
