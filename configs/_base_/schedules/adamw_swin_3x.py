# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_swin_1x for 36 epochs.
_base_ = './adamw_3x.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            key: dict(decay_mult=0.0)
            for key in ('relative_bias.table', 'position_table', 'cls_token', 'mixer.position', 'mixer.scale')
        }
    )
)
