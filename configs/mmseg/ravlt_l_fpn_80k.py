# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_fpn_80k.py'

model = dict(
    backbone=dict(arch='large', init_cfg=dict(checkpoint='mmlinattn://ravlt_l')),
    neck=dict(in_channels=[96, 192, 448, 640]),
)
