# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_pvt_t_fpn_80k.py'

model = dict(
    backbone=dict(arch='flatten-tiny', init_cfg=dict(checkpoint='mmlinattn://flatten_pvt_t')),
)
