# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# 12 epochs of AdamW, 16 images per step. Warm-up (500 iterations from 0.001) and steps (epochs 8 and
# 11) are upstream's.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    # The releases go by the name: keys with 'norm' do not decay, other norms (those of the stem) do.
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
)
