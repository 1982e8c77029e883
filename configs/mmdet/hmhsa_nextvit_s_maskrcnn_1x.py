# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of a paper: the recipe is Next-ViT's.
# The authors published no weights: it starts from none.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '../_base_/schedules/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
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
