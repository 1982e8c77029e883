# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_t_upernet_160k.py'

model = dict(
    backbone=dict(arch='inline-base', init_cfg=dict(checkpoint='mmlinattn://inline_swin_b')),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512),
)
