# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# No row of the paper: the recipe is that of RAVLT's rows, on Swin.
# The authors published no weights of this size: it starts from none.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '../_base_/schedules/adamw_1x.py',
    'mmdet::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

model = dict(
    # the pyramid starts at the second map
    backbone=dict(_delete_=True, type='LinearSwin', arch='rala-tiny', out_indices=(1, 2, 3)),
    neck=dict(in_channels=[192, 384, 768], start_level=0),
)
optim_wrapper = dict(optimizer=dict(weight_decay=1e-4))
