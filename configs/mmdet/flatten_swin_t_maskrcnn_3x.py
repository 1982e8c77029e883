# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    '../_base_/datasets/coco_instance_ms_crop.py',
    '../_base_/schedules/adamw_3x.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearSwin',
        arch='flatten-tiny',
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://flatten_swin_t'),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
