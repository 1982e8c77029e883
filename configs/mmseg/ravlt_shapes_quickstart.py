# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# A segmentor for the shapes data set: minutes on two CPU cores. For an ADE20K recipe see ravlt_b_upernet_160k.py.
#   python tools/make_shapes_dataset.py data/shapes_ade --format ade --num-train 800 --num-val 100
_base_ = [
    'mmseg::_base_/models/fpn_r50.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

data_root = 'data/shapes_ade/'
metainfo = dict(
    classes=('gradient', 'clouds', 'stripes', 'checker', 'disc', 'square', 'triangle', 'star', 'cross', 'heart')
)

model = dict(
    data_preprocessor=dict(size=None, size_divisor=32),
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='RAVLT',
        arch=dict(embed_dims=(32, 64, 128, 160), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 5)),
        norm_cfg=dict(type='BN'),
        drop_path_rate=0.0,
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='normal')],  # narrow: see the detector's quickstart
    ),
    neck=dict(in_channels=[32, 64, 128, 160], out_channels=64, norm_cfg=dict(type='BN')),
    decode_head=dict(
        in_channels=[64, 64, 64, 64], channels=64, num_classes=len(metainfo['classes']), norm_cfg=dict(type='BN')
    ),
)

# MMSegmentation's ADE20KDataset takes no class names but ADE20K's
dataset = dict(type='BaseSegDataset', data_root=data_root, metainfo=metainfo, reduce_zero_label=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomCrop', crop_size=(96, 96)),  # of 160x160: a third of the time, and other images every epoch
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(batch_size=8, num_workers=1, dataset=dict(dataset, pipeline=train_pipeline))
val_dataloader = dict(num_workers=1, dataset=dict(dataset, pipeline=test_pipeline))
test_dataloader = val_dataloader

max_iters = 800
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=0.9, eta_min=0.0, begin=30, end=max_iters, by_epoch=False),
]
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=100, max_keep_ckpts=2),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'),
)
randomness = dict(seed=0)
