# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of the paper: the recipe is that of RAVLT's rows, on Swin.
# The authors published no weights of this size: it starts from none.
_base_ = [
    '../_base_/models/fpn_ade20k.py',
    '../_base_/datasets/ade20k_8xb2.py',
    '../_base_/schedules/adamw_fpn_80k.py',
    'mmseg::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(_delete_=True, type='LinearSwin', arch='rala-tiny'),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
