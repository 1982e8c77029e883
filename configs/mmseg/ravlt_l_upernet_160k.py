# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_upernet_160k.py'

model = dict(
    backbone=dict(arch='large', init_cfg=dict(checkpoint='mmlinattn://ravlt_l')),
    decode_head=dict(in_channels=[96, 192, 448, 640]),
    auxiliary_head=dict(in_channels=448),
)
