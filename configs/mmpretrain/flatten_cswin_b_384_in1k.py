# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_swin_b_384_in1k.py'

# The authors published no file of the 224 model: this is where tools/train.py leaves one.
checkpoint = 'work_dirs/flatten_cswin_b_in1k/epoch_300.pth'
model = dict(
    backbone=dict(type='LinearCSWin', arch='flatten-base-384', init_cfg=dict(checkpoint=checkpoint)),
    head=dict(in_channels=768, init_cfg=dict(checkpoint=checkpoint)),
)
