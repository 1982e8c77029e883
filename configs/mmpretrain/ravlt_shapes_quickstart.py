# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
# A classifier for the shapes data set: minutes on two CPU cores. For an ImageNet recipe see ravlt_b_in1k.py.
#   python tools/make_shapes_dataset.py data/shapes_imagenet --format imagenet --num-train 960 --num-val 240
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs32.py',
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/default_runtime.py',
]

data_root = 'data/shapes_imagenet'
metainfo = dict(
    classes=(
        'plain disc', 'striped disc',
        'plain square', 'striped square',
        'plain triangle', 'striped triangle',
        'plain star', 'striped star',
        'plain cross', 'striped cross',
        'plain heart', 'striped heart',
    )
)  # fmt: skip
num_classes = len(metainfo['classes'])
size = 64  # the shape is half of the image or more

model = dict(
    _scope_='mmpretrain',  # mmengine.hub builds it outside of any run
    type='ImageClassifier',
    backbone=dict(
        type='RAVLT',
        arch=dict(embed_dims=(32, 64, 128, 160), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 5)),
        out_indices=(3,),
        out_norm=False,
        drop_path_rate=0.0,
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='normal')],  # narrow: see the detector's quickstart
    ),
    neck=dict(type='ConvProjectionNeck', in_channels=160, out_channels=256),
    head=dict(
        type='LinearClsHead',
        in_channels=256,
        num_classes=num_classes,
        loss=dict(type='CrossEntropyLoss'),
        topk=(1,),
    ),
)
data_preprocessor = dict(num_classes=num_classes)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(size, size)),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(size, size)),
    dict(type='PackInputs'),
]
train_dataloader = dict(num_workers=1, dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline))
val_dataloader = dict(num_workers=1, dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1,))
test_evaluator = val_evaluator

max_epochs = 5  # of 30 iterations, with 960 images
train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=max_epochs)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    constructor='MergedOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(
        type='CosineAnnealingLR',
        T_max=max_epochs,
        eta_min_ratio=0.01,
        begin=0,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=1, max_keep_ckpts=2))
randomness = dict(seed=0)
