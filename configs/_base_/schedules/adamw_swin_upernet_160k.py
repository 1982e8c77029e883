# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_upernet_160k as Swin and its successors use it: position tables and learned scales do not decay either.
_base_ = './adamw_upernet_160k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            key: dict(decay_mult=0.0)
            for key in ('relative_bias.table', 'position_table', 'cls_token', 'mixer.position', 'mixer.scale')
        }
    )
)
