# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_pvt_t_maskrcnn_1x.py'

model = dict(
    backbone=dict(arch='inline-small', init_cfg=dict(checkpoint='mmlinattn://inline_pvt_s')),
)
