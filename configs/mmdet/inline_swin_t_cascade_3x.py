# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Not in the paper, unlike the next two sizes.
_base_ = [
    '../_base_/models/cascade_mask_rcnn_4conv1fc_giou.py',
    '../_base_/datasets/coco_instance_ms_crop.py',
    '../_base_/schedules/adamw_3x.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearSwin',
        arch='inline-tiny',
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://inline_swin_t'),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
