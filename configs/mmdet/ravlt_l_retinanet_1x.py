# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './ravlt_b_retinanet_1x.py'

model = dict(
    backbone=dict(arch='large', init_cfg=dict(checkpoint='mmlinattn://ravlt_l')),
    neck=dict(in_channels=[192, 448, 640]),
)
