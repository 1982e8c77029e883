# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_b_384_in1k.py'

model = dict(
    backbone=dict(type='LinearCSWin', init_cfg=dict(checkpoint='mmlinattn://inline_cswin_b')),
    head=dict(in_channels=768, init_cfg=dict(checkpoint='mmlinattn://inline_cswin_b_in1k')),
)
