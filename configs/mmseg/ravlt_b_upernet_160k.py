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
        type='RAVLT',
        arch='base',
        norm_cfg=dict(type='SyncBN'),
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://ravlt_b'),
    ),
    decode_head=dict(in_channels=[96, 192, 384, 512]),
    auxiliary_head=dict(in_channels=384),
)
