# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = [
    # upstream's Swin, for its label smoothing, mixup 0.8 and cutmix 1.0
    'mmpretrain::_base_/models/swin_transformer/tiny_224.py',
    '../_base_/datasets/imagenet_8xb128_deit_224.py',
    # AdamW, 300 epochs, 5 of them warm-up
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_conformer.py',
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

# No init_cfg of the backbone: this is the training that the released weights come from.
model = dict(
    backbone=dict(_delete_=True, type='RAVLT', arch='base', out_indices=(3,), out_norm=False),
    neck=dict(_delete_=True, type='ConvProjectionNeck', in_channels=512, out_channels=1024),
    head=dict(in_channels=1024),
)
optim_wrapper = dict(constructor='MergedOptimWrapperConstructor')
