# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# ImageNet in 300 epochs as Swin, InLine and FLatten: AdamW, 20 epochs of warm-up, cosine. Norms, biases and the weights
# that the backbone's no_weight_decay names do not decay; layer scales and FLatten's scales do.
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    paramwise_cfg=dict(_delete_=True, norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=5.0),
)
