# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_upernet_160k.py'

model = dict(
    backbone=dict(arch='small', init_cfg=dict(checkpoint='mmlinattn://ravlt_s')),
    decode_head=dict(in_channels=[64, 128, 320, 512]),
    auxiliary_head=dict(in_channels=320),
)
