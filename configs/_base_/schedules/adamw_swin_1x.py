# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_1x as Swin and its successors use it: position tables and learned scales do not decay either.
_base_ = ['./adamw_1x.py', './swin_no_decay.py']

optim_wrapper = dict(paramwise_cfg=dict(custom_keys=_base_.no_decay))
