# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# 12 epochs of AdamW, 16 images a step. Warm-up (500 iterations from 0.001) and steps (epochs 8 and
# 11) are upstream's.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    # The releases go by the name: keys with 'norm' do not decay, other norms do. The norm of a
    # down-sampling is such a key there and 'layers.1' here.
    paramwise_cfg=dict(
        custom_keys={
            key: dict(decay_mult=0.0)
            for key in ('norm', *(f'patch_embeds.{i}.layers.1' for i in (1, 2, 3)))
        }
    ),
)
