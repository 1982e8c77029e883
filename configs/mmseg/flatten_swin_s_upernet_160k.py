# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_t_upernet_160k.py'

model = dict(
    backbone=dict(arch='flatten-small', init_cfg=dict(checkpoint='mmlinattn://flatten_swin_s')),
)
