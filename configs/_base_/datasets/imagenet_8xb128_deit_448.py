# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# imagenet_8xb128_deit_224 at 448x448, tested on the same share of the image.
_base_ = './imagenet_8xb128_deit_224.py'

sizes = dict(RandomResizedCrop=dict(scale=448), ResizeEdge=dict(scale=512), CenterCrop=dict(crop_size=448))
train_pipeline = [dict(transform, **sizes.get(transform.type, dict())) for transform in _base_.train_pipeline]
test_pipeline = [dict(transform, **sizes.get(transform.type, dict())) for transform in _base_.test_pipeline]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
