# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = [
    # upstream's Swin, for its label smoothing, mixup 0.8 and cutmix 1.0
    'mmpretrain::_base_/models/swin_transformer/tiny_224.py',
    '../_base_/datasets/imagenet_8xb128_deit_224.py',
    '../_base_/schedules/adamw_in1k.py',
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(_delete_=True, type='LinearNextViT', arch='hmhsa-small', out_indices=(3,)),
    head=dict(in_channels=1024),
)
