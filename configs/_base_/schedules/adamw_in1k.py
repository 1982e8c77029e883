# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# ImageNet in 300 epochs as Swin, InLine and FLatten: AdamW, 20 epochs of warm-up, cosine; norms, biases, position
# tables and learned scales do not decay.
_base_ = ['mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py', './swin_no_decay.py']

optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    paramwise_cfg=dict(custom_keys=_base_.no_decay),
    clip_grad=dict(max_norm=5.0),
)
