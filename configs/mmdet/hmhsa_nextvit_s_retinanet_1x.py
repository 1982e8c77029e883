# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of a paper: the recipe is RAVLT's.
# The authors published no weights: it starts from none.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '../_base_/schedules/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearNextViT',
        arch='hmhsa-small',
        out_indices=(1, 2, 3),  # the pyramid starts at the second map
        norm_cfg=dict(type='SyncBN'),
    ),
    neck=dict(in_channels=[256, 512, 1024], start_level=0),
)
optim_wrapper = dict(optimizer=dict(weight_decay=1e-4))
