# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Fine-tunes the 224 model, its head included.
_base_ = [
    # upstream's Swin, for its label smoothing, mixup 0.8 and cutmix 1.0
    'mmpretrain::_base_/models/swin_transformer/tiny_224.py',
    '../_base_/datasets/imagenet_8xb64_deit_384.py',
    '../_base_/schedules/adamw_finetune_384.py',
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearSwin',
        arch='inline-base-384',
        out_indices=(3,),
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://inline_swin_b'),
    ),
    head=dict(
        in_channels=1024,
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='mmlinattn://inline_swin_b_in1k', prefix='head.'),
    ),
)
