# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './flatten_pvt_v2_b1_in1k.py'

model = dict(backbone=dict(arch='hmhsa-b1'))
