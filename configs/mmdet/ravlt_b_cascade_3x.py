# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# RALA Tab. 5: RAVLT-B, Cascade Mask R-CNN, 36 epochs at many scales: 55.3 box AP, 47.7 mask AP.
# 8 GPUs with 2 images each and --amp, as published:
#   bash tools/dist_train.sh configs/mmdet/ravlt_b_cascade_3x.py 8 --amp
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
        type='RAVLT',
        arch='base',
        norm_cfg=dict(type='SyncBN'),
        # ImageNet weights of the authors; model.backbone.init_cfg=None trains from scratch.
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://ravlt_b'),
    ),
    neck=dict(in_channels=[96, 192, 384, 512]),
)
