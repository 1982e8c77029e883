# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_b_384_in1k.py'

model = dict(
    backbone=dict(arch='flatten-base-384', init_cfg=dict(checkpoint='mmlinattn://flatten_swin_b')),
    head=dict(init_cfg=dict(checkpoint='mmlinattn://flatten_swin_b_in1k')),
)
