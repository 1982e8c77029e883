# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of a paper: a plain backbone under the simple feature pyramid of ViTDet.
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
        type='LinearDeiT',
        arch='inline-tiny',
        out_type='featmap',
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://inline_deit_t'),
    ),
    neck=dict(_delete_=True, type='SimpleFeaturePyramid', in_channels=192, out_channels=256, num_outs=5),
)
