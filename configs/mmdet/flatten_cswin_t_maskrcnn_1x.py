# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
_base_ = './inline_cswin_t_maskrcnn_1x.py'

model = dict(
    backbone=dict(arch='flatten-tiny', init_cfg=dict(checkpoint='mmlinattn://flatten_cswin_t')),
)
