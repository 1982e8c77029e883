# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# The detector that tools/quickstart.sh trains on two CPU cores in a few minutes. Sized for
# images of 160x160; for a COCO recipe see ravlt_b_cascade_3x.py.
_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::_base_/datasets/coco_instance.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

data_root = 'data/shapes_coco/'
metainfo = dict(classes=('disc', 'square', 'triangle', 'star', 'cross', 'heart'))
num_classes = len(metainfo['classes'])
width = 64  # channels of the pyramid and the heads

model = dict(
    backbone=dict(
        _delete_=True,
        type='RAVLT',
        arch=dict(embed_dims=(32, 64, 128, 160), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 5)),
        # strides 8 to 32: the shapes are 29 to 80 pixels, and the finest map would take half of the time
        out_indices=(1, 2, 3),
        norm_cfg=dict(type='BN'),
        drop_path_rate=0.0,
        # a narrow model that has minutes: the usual std of 0.02 suits widths of hundreds and weeks. With it in the
        # convolutions, too, box AP50 is 87.4.
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='normal')],
    ),
    # batch norm throughout: it trains fastest from scratch
    neck=dict(in_channels=[64, 128, 160], out_channels=width, num_outs=4, norm_cfg=dict(type='BN')),
    rpn_head=dict(in_channels=width, feat_channels=width, anchor_generator=dict(scales=[4], strides=[8, 16, 32, 64])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=width, featmap_strides=[8, 16, 32], roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(
            type='ConvFCBBoxHead',
            num_shared_convs=1,
            num_shared_fcs=1,
            in_channels=width,
            conv_out_channels=width,
            fc_out_channels=256,
            norm_cfg=dict(type='BN'),
            num_classes=num_classes,
        ),
        mask_roi_extractor=dict(out_channels=width, featmap_strides=[8, 16, 32], roi_layer=dict(sampling_ratio=1)),
        mask_head=dict(
            num_convs=2, in_channels=width, conv_out_channels=width, norm_cfg=dict(type='BN'), num_classes=num_classes
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=256, max_per_img=256),
        rcnn=dict(sampler=dict(num=32, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=256, max_per_img=100), rcnn=dict(max_per_img=50)),
)

size = (160, 160)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

max_epochs = 5  # of 85 iterations, with 716 images, 36 of them empty
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR',
        T_max=max_epochs,
        eta_min_ratio=0.01,
        begin=0,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
default_hooks = dict(
    logger=dict(interval=10),
    visualization=dict(score_thr=0.5),
    checkpoint=dict(interval=1, max_keep_ckpts=2),
)
randomness = dict(seed=0)
