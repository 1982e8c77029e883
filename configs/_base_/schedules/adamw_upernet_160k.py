# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# The usual schedule of UperNet on transformer backbones: AdamW, linear warm-up and linear decay.
_base_ = 'mmseg::_base_/schedules/schedule_160k.py'

optimizer = dict(_delete_=True, type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01)
optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    optimizer=optimizer,
    # The releases go by the name: keys with 'norm' do not decay, other norms (those of stem and heads) do.
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0))),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=160000, by_epoch=False),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
