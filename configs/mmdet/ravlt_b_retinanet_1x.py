# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
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
        type='RAVLT',
        arch='base',
        # The release gives all four maps to a pyramid that starts at the second. That is the same
        # network, but the norm of the first map gets no gradient, at which distributed training
        # stops.
        out_indices=(1, 2, 3),
        norm_cfg=dict(type='SyncBN'),
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://ravlt_b'),
    ),
    neck=dict(in_channels=[192, 384, 512], start_level=0),
)
optim_wrapper = dict(optimizer=dict(weight_decay=1e-4))
