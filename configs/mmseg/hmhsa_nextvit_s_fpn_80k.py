# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of a paper: the recipe is Next-ViT's, at the usual 16 images per step.
# The authors published no weights: it starts from none.
_base_ = [
    '../_base_/models/fpn_ade20k.py',
    '../_base_/datasets/ade20k_8xb2.py',
    '../_base_/schedules/adamw_fpn_80k.py',
    'mmseg::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearNextViT',
        arch='hmhsa-small',
        norm_cfg=dict(type='SyncBN'),
    ),
    neck=dict(in_channels=[96, 256, 512, 1024]),
)
