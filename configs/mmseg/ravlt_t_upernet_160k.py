# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_upernet_160k.py'

model = dict(
    backbone=dict(arch='tiny', init_cfg=dict(checkpoint='mmlinattn://ravlt_t')),
    decode_head=dict(in_channels=[64, 128, 256, 512]),
    auxiliary_head=dict(in_channels=256),
)
