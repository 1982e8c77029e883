# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# COCO at many scales, half of the images cropped: the training augmentation of DETR and Sparse
# R-CNN. Testing stays at 1333x800.
_base_ = 'mmdet::_base_/datasets/coco_instance.py'

multi_scale_resize = dict(
    type='RandomChoiceResize',
    scales=[(1333, short) for short in range(480, 801, 32)],
    keep_ratio=True,
)
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=_base_.backend_args),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [multi_scale_resize],
            [
                dict(
                    type='RandomChoiceResize',
                    scales=[(1333, 400), (1333, 500), (1333, 600)],
                    keep_ratio=True,
                ),
                dict(
                    type='RandomCrop',
                    crop_type='absolute_range',
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                multi_scale_resize,
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
