# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_fpn_80k on Swin: position tables and learned scales do not decay, as in its other recipes.
_base_ = ['./adamw_fpn_80k.py', './swin_no_decay.py']

optim_wrapper = dict(paramwise_cfg=dict(custom_keys=_base_.no_decay))
