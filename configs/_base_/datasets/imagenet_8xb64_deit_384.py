# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# imagenet_8xb128_deit_224 at 384x384, tested on the whole image, as Swin is fine-tuned. 512 images per step on 8 GPUs.
_base_ = './imagenet_8xb128_deit_224.py'

train_pipeline = [
    dict(transform, scale=384) if transform.type == 'RandomResizedCrop' else transform
    for transform in _base_.train_pipeline
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=384, backend='pillow', interpolation='bicubic'),
    dict(type='PackInputs'),
]

train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=64, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
