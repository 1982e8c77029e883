# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# Swin's fine-tuning of a 224 model at 384: 30 epochs, 5 of them warm-up, next to no decay. 512 images per step.
_base_ = './adamw_in1k.py'

max_epochs = 30
train_cfg = dict(max_epochs=max_epochs)
optim_wrapper = dict(optimizer=dict(lr=2e-5, weight_decay=1e-8))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', T_max=max_epochs - 5, eta_min=2e-7, by_epoch=True, begin=5, end=max_epochs),
]
auto_scale_lr = dict(base_batch_size=512)
