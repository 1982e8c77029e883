# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_upernet_160k as Swin and its successors use it: position tables and learned scales do not decay either.
_base_ = ['./adamw_upernet_160k.py', './swin_no_decay.py']

optim_wrapper = dict(paramwise_cfg=dict(custom_keys=_base_.no_decay))
