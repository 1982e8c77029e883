# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# 12 epochs as PVT trains detectors: small decay of all weights. 16 images per step; warm-up
# (500 iterations from 0.001) and steps (epochs 8 and 11) are upstream's.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, betas=(0.9, 0.999), weight_decay=1e-4),
)
