# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# The usual schedule of Semantic FPN on transformer backbones: AdamW, poly decay, no warm-up.
_base_ = 'mmseg::_base_/schedules/schedule_80k.py'

optimizer = dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4)
optim_wrapper = dict(constructor='MergedOptimWrapperConstructor', optimizer=optimizer)
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, begin=0, end=80000, by_epoch=False)]
auto_scale_lr = dict(enable=False, base_batch_size=16)
