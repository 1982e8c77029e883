# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The published recipe of every config: what was printed in the papers or released with them, written by hand.

:func:`summary` reads the same things out of a config. ``test_recipes.py`` compares the two whole.
"""

import json
import re


def line(step) -> str:
    """``type(key=value, ...)`` of a part of a config, keys in order and tuples as lists."""
    left_out = 'type', 'backend_args', 'backend', '_scope_'
    values = {key: json.loads(json.dumps(value)) for key, value in sorted(step.items()) if key not in left_out}
    return f'{step["type"]}({", ".join(f"{key}={value}" for key, value in values.items())})'


def steps(pipeline) -> list[str]:
    """The transforms of a pipeline that change images, one line each."""
    lines = []
    for step in pipeline:
        if step['type'] == 'RandomChoice':
            lines += [f'either {i}: {each}' for i, branch in enumerate(step['transforms']) for each in steps(branch)]
        elif not step['type'].startswith(('Load', 'Pack')):
            lines.append(line(step))
    return lines


def summary(cfg) -> dict:
    """What :data:`RECIPES` holds, of a config."""
    optim, loop = cfg.optim_wrapper, cfg.train_cfg
    data = cfg.train_dataloader
    found = dict(
        optimizer=line(optim.optimizer),
        wrapper=optim.get('type', 'OptimWrapper'),
        clip=optim.get('clip_grad') and optim.clip_grad.get('max_norm'),
        schedule=[line(step) for step in cfg.param_scheduler],
        length=loop.get('max_epochs') or loop.get('max_iters'),
        images=8 * data.batch_size,
        base_batch=cfg.auto_scale_lr.base_batch_size,
        train=steps(data.dataset.pipeline),
        test=steps(cfg.test_dataloader.dataset.pipeline),
    )
    if cfg.default_scope == 'mmpretrain':
        found['augments'] = [line(step) for step in cfg.model.train_cfg.augments]
        found['label_smoothing'] = cfg.model.head.loss.label_smooth_val
    return found


# --- what the papers and releases print -------------------------------------------------------------------------------

ADAMW = 'AdamW(betas=[0.9, 0.999], lr={}, weight_decay={})'
WARM_UP_500 = 'LinearLR(begin=0, by_epoch=False, end=500, start_factor=0.001)'
FLIP = 'RandomFlip(prob=0.5)'
SHORT_SIDES = f'RandomChoiceResize(keep_ratio=True, scales={[[1333, side] for side in range(480, 801, 32)]})'

DETECTION = dict(
    wrapper='OptimWrapper', clip=None, images=16, base_batch=16, test=['Resize(keep_ratio=True, scale=[1333, 800])']
)
SCHEDULES = {
    '1x': dict(
        length=12,
        schedule=[WARM_UP_500, 'MultiStepLR(begin=0, by_epoch=True, end=12, gamma=0.1, milestones=[8, 11])'],
        train=['Resize(keep_ratio=True, scale=[1333, 800])', FLIP],
    ),
    '3x': dict(  # with the multi-scale crops of DETR
        length=36,
        schedule=[WARM_UP_500, 'MultiStepLR(begin=0, by_epoch=True, end=36, gamma=0.1, milestones=[27, 33])'],
        train=[
            FLIP,
            f'either 0: {SHORT_SIDES}',
            'either 1: RandomChoiceResize(keep_ratio=True, scales=[[1333, 400], [1333, 500], [1333, 600]])',
            'either 1: RandomCrop(allow_negative_crop=True, crop_size=[384, 600], crop_type=absolute_range)',
            f'either 1: {SHORT_SIDES}',
        ],
    ),
}
SEGMENTATION = dict(
    wrapper='OptimWrapper',
    clip=None,
    images=16,
    base_batch=16,
    train=[
        'RandomResize(keep_ratio=True, ratio_range=[0.5, 2.0], scale=[2048, 512])',
        'RandomCrop(cat_max_ratio=0.75, crop_size=[512, 512])',
        FLIP,
        'PhotoMetricDistortion()',
    ],
    test=['Resize(keep_ratio=True, scale=[2048, 512])'],
)
METHODS = {
    'fpn_80k': dict(
        optimizer=ADAMW.format(0.0001, 0.0001),
        length=80000,
        schedule=['PolyLR(begin=0, by_epoch=False, end=80000, eta_min=0.0, power=0.9)'],
    ),
    'upernet_160k': dict(
        optimizer=ADAMW.format(6e-05, 0.01),
        length=160000,
        schedule=[
            'LinearLR(begin=0, by_epoch=False, end=1500, start_factor=1e-06)',
            'PolyLR(begin=1500, by_epoch=False, end=160000, eta_min=0.0, power=1.0)',
        ],
    ),
}
CLASSIFICATION = dict(
    wrapper='OptimWrapper',
    augments=['Mixup(alpha=0.8)', 'CutMix(alpha=1.0)'],
    label_smoothing=0.1,
)
ADAMW_IN1K = 'AdamW(betas=[0.9, 0.999], eps=1e-08, lr={}, weight_decay={})'
COSINE_300 = dict(optimizer=ADAMW_IN1K.format(0.001, 0.05), length=300, images=1024, base_batch=1024)
COSINES = {
    'ravlt': dict(
        COSINE_300,
        clip=None,
        schedule=[
            'LinearLR(begin=0, by_epoch=True, convert_to_iter_based=True, end=5, start_factor=0.001)',
            'CosineAnnealingLR(T_max=295, begin=5, by_epoch=True, end=300, eta_min=1e-05)',
        ],
    ),
    'hosts': dict(  # the recipe of Swin
        COSINE_300,
        clip=5.0,
        schedule=[
            'LinearLR(by_epoch=True, convert_to_iter_based=True, end=20, start_factor=0.001)',
            'CosineAnnealingLR(begin=20, by_epoch=True, eta_min=1e-05)',
        ],
    ),
    '384': dict(  # fine-tuning from 224
        optimizer=ADAMW_IN1K.format(2e-05, 1e-08),
        length=30,
        images=512,
        base_batch=512,
        clip=5.0,
        schedule=[
            'LinearLR(begin=0, by_epoch=True, convert_to_iter_based=True, end=5, start_factor=0.001)',
            'CosineAnnealingLR(T_max=25, begin=5, by_epoch=True, end=30, eta_min=2e-07)',
        ],
    ),
}


def pictures(size: int) -> dict:
    """DeiT's augmentation for training at ``size`` pixels, and the images of the test."""
    edges = {224: 256, 288: 329, 448: 512}
    test = ['Resize(interpolation=bicubic, scale=384)']
    if size in edges:
        test = [f'ResizeEdge(edge=short, interpolation=bicubic, scale={edges[size]})', f'CenterCrop(crop_size={size})']
    return dict(
        train=[
            f'RandomResizedCrop(interpolation=bicubic, scale={size})',
            'RandomFlip(direction=horizontal, prob=0.5)',
            "RandAugment(hparams={'pad_val': [104, 116, 124], 'interpolation': 'bicubic'}, magnitude_level=9, "
            'magnitude_std=0.5, num_policies=2, policies=timm_increasing, total_level=10)',
            'RandomErasing(erase_prob=0.25, fill_color=[103.53, 116.28, 123.675], fill_std=[57.375, 57.12, 58.395], '
            f'max_area_ratio={1 / 3}, min_area_ratio=0.02, mode=rand)',
        ],
        test=test,
    )


def parse(name: str) -> tuple[str, str, str, int, str]:
    """``task/stem`` -> task, host, size, pixels of classification, recipe."""
    task, stem = name.split('/')
    backbone, recipe = re.fullmatch(
        r'(.*?)_(maskrcnn_.x|cascade_.x|retinanet_.x|fpn_80k|upernet_160k|in1k)', stem
    ).groups()
    method, *rest = backbone.split('_')
    pixels = 224
    if rest[-1] == '384':
        pixels, rest = 384, rest[:-1]
    *host, size = rest
    host = '_'.join(host) or method
    if (method, host) == ('inline', 'deit'):  # InLine Tab. 14
        pixels = dict(t=224, s=288, b=448)[size]
    return task, host, size, pixels, recipe


def published(name: str) -> dict:
    """The recipe of a config by its name."""
    task, host, _, pixels, recipe = parse(name)
    if task == 'mmdet':
        head, schedule = recipe.split('_')
        rates = (0.0002, 0.0001) if host in ('pvt', 'pvt_v2') else (0.0001, 0.05)
        rates = (0.0001, 0.0001) if head == 'retinanet' else rates
        return dict(DETECTION, **SCHEDULES[schedule], optimizer=ADAMW.format(*rates))
    if task == 'mmseg':
        return dict(SEGMENTATION, **METHODS[recipe])
    cosine = COSINES['ravlt' if host == 'ravlt' else '384' if pixels == 384 else 'hosts']
    return dict(CLASSIFICATION, **cosine, **pictures(pixels))
