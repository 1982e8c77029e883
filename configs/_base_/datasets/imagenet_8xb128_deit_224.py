# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# ImageNet-1K at 224x224 under DeiT's augmentation, identical to upstream's Swin data:
# RandAugment m9-mstd0.5-inc1 and random erasing 0.25. 1024 images per step on 8 GPUs.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
