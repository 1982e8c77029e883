# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# ADE20K in 512x512 crops, 16 images per step on 8 GPUs; tested at 2048x512, ratio kept.
_base_ = 'mmseg::_base_/datasets/ade20k.py'

# reduce_zero_label is left to the data set (ADE20KDataset's is True), so that one of your own says it once
train_pipeline = [{k: step[k] for k in step if k != 'reduce_zero_label'} for step in _base_.train_pipeline]
test_pipeline = [{k: step[k] for k in step if k != 'reduce_zero_label'} for step in _base_.test_pipeline]

train_dataloader = dict(batch_size=2, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
