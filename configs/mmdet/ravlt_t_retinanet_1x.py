# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_retinanet_1x.py'

model = dict(
    backbone=dict(arch='tiny', init_cfg=dict(checkpoint='mmlinattn://ravlt_t')),
    neck=dict(in_channels=[128, 256, 512]),
)
