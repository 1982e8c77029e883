# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_swin_1x for 36 epochs.
_base_ = ['./adamw_3x.py', './swin_no_decay.py']

optim_wrapper = dict(paramwise_cfg=dict(custom_keys=_base_.no_decay))
