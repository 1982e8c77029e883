# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_maskrcnn_3x.py'

model = dict(
    backbone=dict(arch='small', init_cfg=dict(checkpoint='mmlinattn://ravlt_s')),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
