# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# adamw_1x for 36 epochs.
_base_ = './adamw_1x.py'

max_epochs = 36
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = [
    _base_.param_scheduler[0],  # warm-up
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=max_epochs, milestones=[27, 33], gamma=0.1),
]
