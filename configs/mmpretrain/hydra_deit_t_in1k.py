# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_deit_t_in1k.py'

model = dict(backbone=dict(arch='hydra-tiny'))
