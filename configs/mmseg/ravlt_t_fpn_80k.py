# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_fpn_80k.py'

model = dict(
    backbone=dict(arch='tiny', init_cfg=dict(checkpoint='mmlinattn://ravlt_t')),
    neck=dict(in_channels=[64, 128, 256, 512]),
)
