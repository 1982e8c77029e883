# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = [
    '../_base_/models/fpn_ade20k.py',
    '../_base_/datasets/ade20k_8xb2.py',
    '../_base_/schedules/adamw_fpn_80k.py',
    'mmseg::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        _delete_=True,
        type='LinearPVT',
        arch='inline-tiny',
        init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://inline_pvt_t'),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
