# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Recipe of all backbones. projects.bccd sets backbone, size, seed and paths.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/default_runtime.py',
    '../../configs/_base_/default_runtime.py',
]

size = (256, 192)  # width, height; the photographs have 640x480
metainfo = dict(classes=('RBC', 'WBC', 'Platelets'))

width = 128  # channels of pyramid and heads: half of COCO's recipe, for two cores; also half as many convolutions

model = dict(
    # feature maps of strides 8, 16 and 32
    neck=dict(start_level=0, out_channels=width),
    bbox_head=dict(
        num_classes=3,
        in_channels=width,
        feat_channels=width,
        stacked_convs=2,
        # platelets have 13 pixels at 256x192, the smallest anchors of COCO's recipe 32
        anchor_generator=dict(octave_base_scale=2),
    ),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
_data = dict(metainfo=metainfo, data_prefix=dict(img='JPEGImages/'))
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(pipeline=train_pipeline, **_data),
)
val_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False, dataset=dict(pipeline=test_pipeline, **_data)
)
test_dataloader = val_dataloader

max_epochs = 8  # of 73 iterations
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=50),
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=max_epochs, milestones=[6, 7], gamma=0.1),
]
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(max_keep_ckpts=1), visualization=dict(score_thr=0.4))
