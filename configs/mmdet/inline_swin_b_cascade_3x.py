# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_t_cascade_3x.py'

model = dict(
    backbone=dict(arch='inline-base', init_cfg=dict(checkpoint='mmlinattn://inline_swin_b')),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
