# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = [
    '../_base_/models/upernet_ade20k.py',
    '../_base_/datasets/ade20k_8xb2.py',
    '../_base_/schedules/adamw_upernet_160k.py',
    'mmseg::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearSwin',
        arch='inline-tiny',
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://inline_swin_t'),
    ),
    decode_head=dict(in_channels=[96, 192, 384, 768]),
    auxiliary_head=dict(in_channels=384),
)
