# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# ADE20K in 512x512 crops, 16 images a step on 8 GPUs; tested at 2048x512, ratio kept.
_base_ = 'mmseg::_base_/datasets/ade20k.py'

train_dataloader = dict(batch_size=2)
