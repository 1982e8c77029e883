# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings of a config for a user's data: model, pipelines, data sets and schedule."""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mmengine.config import Config

from ...checkpoints.released import released_checkpoints
from ..swapping.writing import difference
from ..swapping.zoo import find_backbone
from .data import ConfigArgs, OwnData
from .images import ImageFormat

TASKS = {'detection': 'mmdet', 'segmentation': 'mmseg', 'classification': 'mmpretrain'}
_FROM_SCRATCH = 2e-4  # learning rate of AdamW in docs/real_images.md, without released weights


class Reference(str):
    """Name of a variable of the config, written in place of its value."""

    __repr__ = str.__str__


def _portable(args: ConfigArgs, path: Any) -> str:
    """Return a path relative to the config's folder if it is in or beside that folder, and an absolute path otherwise.
    MMEngine replaces ``{{ fileDirname }}`` by the folder of the config."""
    path, here = Path(path), args.out.parent
    is_near = here in [path, *path.parents] or here.parent in path.parents and here.parent != Path(here.anchor)
    is_near = is_near and "'" not in str(here)  # would end the text in the config
    return f'{{{{ fileDirname }}}}/{Path(os.path.relpath(path, here)).as_posix()}' if is_near else path.as_posix()


def annotation_file(args: ConfigArgs, split: str) -> Path:
    return args.out.with_name(f'{args.out.stem}_{split}.{"json" if args.task == "detection" else "txt"}')


def _fitted(node: Any, data: OwnData) -> Any:
    """Return a part of a model config with the number of classes, BN in place of synchronised batch norms, and a
    threshold for ignored regions. Anchors in ignored regions are background in MMDetection's recipes, which leave
    ``ignore_iof_thr`` off."""
    if isinstance(node, (list, tuple)):
        return type(node)(_fitted(item, data) for item in node)
    if not isinstance(node, dict):
        return node
    out = {key: _fitted(value, data) for key, value in node.items()}
    if 'num_classes' in out:
        out['num_classes'] = len(data.classes)
    if out.get('type') in ('SyncBN', 'MMSyncBN'):
        out['type'] = 'BN'
    if data.ignores and 'ignore_iof_thr' in out:
        out['ignore_iof_thr'] = 0.5
    return out


def config_values(
    args: ConfigArgs, data: OwnData, pixels: ImageFormat, cfg: Config, stem: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the new config by name, and notes on them for the user. ``cfg`` is the inherited config,
    ``stem`` its name without suffix."""
    whole, notes = cfg.to_dict(), list[str]()
    values: dict[str, Any] = dict(data_root=f'{_portable(args, args.root).rstrip("/")}/')
    values['metainfo'] = dict(classes=tuple(data.classes))
    model = _fitted(whole['model'], data)
    if model.get('roi_head') and not data.masks:
        model['type'] = model['type'].replace('MaskRCNN', 'FasterRCNN')
        model['roi_head'].update(mask_roi_extractor=None, mask_head=None)
    load_from, is_scratch = _weights(args, pixels, model, stem, notes)
    values.update(dict(load_from=load_from) if load_from else {})
    task = _settings_of_task(args, data, pixels, cfg, _widen(model, data, notes))
    if pixels.mean is not None:
        model['backbone']['in_channels'] = pixels.channels
    if args.task == 'classification':
        values['data_preprocessor'] = task.preprocessor
    else:
        model['data_preprocessor'] = {**model['data_preprocessor'], **task.preprocessor}
    values.update(model=difference(whole['model'], model), train_pipeline=task.train, test_pipeline=task.test)

    batch = args.batch or task.batch
    for split in data.images:
        ann_file, is_train = _portable(args, annotation_file(args, split)), split == 'train'
        settings = dict(data.settings[split])
        if isinstance(settings['data_prefix'], dict):
            prefixes = settings['data_prefix'].items()
            settings['data_prefix'] = {
                key: f'{_portable(args, path)}/' if os.path.isabs(path) else path for key, path in prefixes
            }
        dataset = dict(
            task.dataset,
            data_root=Reference('data_root'),
            metainfo=Reference('metainfo'),
            ann_file=ann_file,
            **settings,
            **(task.of_train if is_train else task.of_val),
            pipeline=Reference('train_pipeline' if is_train else 'test_pipeline'),
        )
        sizes = dict(batch_size=batch) if is_train or args.task == 'classification' else {}
        values[f'{split}_dataloader'] = dict(num_workers=2, dataset=dataset, **sizes)
        if not is_train and task.evaluator:
            beside = dict(ann_file=ann_file) if args.task == 'detection' else {}
            values[f'{split}_evaluator'] = {**beside, **task.evaluator}
    if 'test' not in data.images:
        values['test_dataloader'] = Reference('val_dataloader')
        values.update({'test_evaluator': Reference('val_evaluator')} if 'val_evaluator' in values else {})

    recipe_rate = cfg.optim_wrapper.optimizer.lr
    base_batch = (cfg.get('auto_scale_lr') or {}).get('base_batch_size', 16)
    rate = _FROM_SCRATCH if is_scratch else float(f'{recipe_rate * batch / base_batch:.2g}')
    values['optim_wrapper'] = dict(optimizer=dict(lr=rate))
    values['auto_scale_lr'] = dict(base_batch_size=batch)
    values.update(schedule(args.task, len(data.images['train']) / batch, cfg))
    origin = '' if is_scratch else f" (the recipe's {recipe_rate:g} is for {base_batch})"
    notes.append(f'learning rate {rate:g} for {batch} images per step{origin}')
    return values, notes


def _weights(
    args: ConfigArgs, pixels: ImageFormat, model: dict, stem: str, notes: list[str]
) -> tuple[Optional[str], bool]:
    """Set ``init_cfg`` of the backbone in ``model``, or return the checkpoint of the whole model for ``load_from``.
    Also return True for a start from scratch. ``stem`` is the name of the inherited config."""
    weights = find_backbone(args.backbone, TASKS[args.task]).checkpoint
    is_scratch = args.scratch or pixels.mean is not None or weights is None
    if is_scratch:
        reason = ': no weights of this backbone are released' if weights is None else ''
        notes.append(f'it learns from scratch{reason}')
    is_whole = not is_scratch and stem in released_checkpoints()
    if not is_scratch and not is_whole:
        model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=weights)
    elif model['backbone'].get('init_cfg'):
        model['backbone']['init_cfg'] = None
    name = stem if is_whole else str(weights).partition('://')[2]
    released = None if is_scratch else released_checkpoints().get(name)
    if released and not released.path.exists():
        notes.append(
            f'the training downloads the weights from {released.link}; offline, put the file at {released.path}, '
            'or set --scratch'
        )
    return f'mmlinattn://{stem}' if is_whole else None, is_scratch


def _widen(model: dict, data: OwnData, notes: list[str]) -> int:
    """Increase a detector's limit of boxes per image to 1.5 times the objects of the densest image, and return it."""
    test = model.get('test_cfg') or {}
    limits = test.get('rcnn', test)
    most = limits.get('max_per_img', 0)
    if 1.5 * data.densest > most > 0:
        most = limits['max_per_img'] = 100 * math.ceil(1.5 * data.densest / 100)
        proposals = [test, test.get('rpn'), (model.get('train_cfg') or {}).get('rpn_proposal')]
        for limit in filter(None, proposals):
            for key in ('nms_pre', 'max_per_img'):
                if key in limit and (limit is not limits or key == 'nms_pre'):
                    limit[key] = max(limit[key], 4 * most)
        notes.append(f'up to {data.densest} objects an image: max_per_img = {most}, and as many are evaluated')
    return most


class _Task(NamedTuple):
    """Settings that differ by task: images per step, pipelines, data preprocessor, data sets and evaluator. ``dataset``
    has the settings of all splits, ``of_train`` and ``of_val`` those of one. ``evaluator`` is {} for the inherited
    evaluator."""

    batch: int
    train: Any
    test: Any
    preprocessor: dict[str, Any]
    dataset: dict[str, Any]
    of_train: dict[str, Any]
    of_val: dict[str, Any]
    evaluator: dict[str, Any]


def _settings_of_task(args: ConfigArgs, data: OwnData, pixels: ImageFormat, cfg: Config, most: int) -> _Task:
    """Return the settings that differ by task; ``most`` boxes of an image are evaluated, ``cfg`` is inherited."""
    long, short = max(pixels.width, pixels.height), min(pixels.width, pixels.height)
    loading: dict[str, Any] = dict(type='LoadImageFromFile')
    preprocessor: dict[str, Any] = {}
    if pixels.mean is not None:
        loading.update(color_type='unchanged', to_float32=True)
        preprocessor.update(mean=pixels.mean, std=pixels.std)
        preprocessor['to_rgb' if args.task == 'classification' else 'bgr_to_rgb'] = False
    if args.task == 'detection':
        ratio = args.size / long if args.size else min(1, 1333 / long, 800 / short)
        resize = dict(type='Resize', scale=(round(long * ratio), round(short * ratio)), keep_ratio=True)
        labels = dict(type='LoadAnnotations', with_bbox=True, **(dict(with_mask=True) if data.masks else {}))
        keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
        train = [loading, labels, resize, dict(type='RandomFlip', prob=0.5), dict(type='PackDetInputs')]
        test = [loading, resize, labels, dict(type='PackDetInputs', meta_keys=keys)]
        if pixels.mean and pixels.std and pixels.channels not in (1, 3):  # MMEngine takes no other lengths
            preprocessor.update({key: [sum(preprocessor[key]) / pixels.channels] for key in ('mean', 'std')})
        kept = dict(filter_cfg=dict(filter_empty_gt=False, min_size=1))  # background, and images below 32 px
        evaluator: dict[str, Any] = dict(metric=['bbox', 'segm'] if data.masks else 'bbox', classwise=True)
        if most > 100:  # pycocotools' mAP ends at 100 boxes an image; MMDetection's own evaluation does not
            evaluator.update(use_mp_eval=True, proposal_nums=(100, 300, max(1000, most)))
        return _Task(2, train, test, preprocessor, {}, kept, {}, evaluator)
    if args.task == 'segmentation':
        side = args.size or max(32, min(512, short // 32 * 32))
        is_large = long > 2048
        labels, pack = dict(type='LoadAnnotations'), dict(type='PackSegInputs')
        scale = (2048, 1024) if is_large else (long, short)
        shrink = [dict(type='Resize', scale=scale, keep_ratio=True)] if is_large else []
        zoom = dict(type='RandomResize', scale=scale, ratio_range=(0.5, 2.0), keep_ratio=True)
        crop = dict(type='RandomCrop', crop_size=(side, side), cat_max_ratio=0.75)
        colours = [dict(type='PhotoMetricDistortion')] if pixels.mean is None else []
        train = [loading, labels, zoom, crop, dict(type='RandomFlip', prob=0.5), *colours, pack]
        dataset = dict(_delete_=True, type='BaseSegDataset')
        preprocessor['size'] = (side, side)
        return _Task(4, train, [loading, *shrink, labels, pack], preprocessor, dataset, {}, dict(test_mode=True), {})
    recipe_side = next(step for step in cfg.train_pipeline if step.type == 'RandomResizedCrop').scale
    side = args.size or recipe_side
    pipelines: tuple[Any, Any] = Reference('_base_.train_pipeline'), Reference('_base_.test_pipeline')
    if pixels.mean is not None or side != recipe_side:
        cut, pack = dict(type='RandomResizedCrop', scale=side), dict(type='PackInputs')
        flip = dict(type='RandomFlip', prob=0.5, direction='horizontal')
        pipelines = [loading, cut, flip, pack], [loading, dict(type='Resize', scale=(side, side)), pack]
    preprocessor = dict(num_classes=len(data.classes), **preprocessor)
    dataset = dict(_delete_=True, type='CustomDataset')
    evaluator = dict(topk=(1, 5) if len(data.classes) > 5 else (1,))
    return _Task(32, *pipelines, preprocessor, dataset, {}, dict(test_mode=True), evaluator)


def schedule(task: str, steps: float, cfg: Config) -> dict[str, Any]:
    """Return loops, learning rate schedule and checkpoint settings for ``steps`` iterations per epoch. Iteration-based
    recipes are shortened for small data sets."""
    if task == 'segmentation':
        total = min(cfg.train_cfg.max_iters, max(4000, round(50 * steps)))
        every, warm = max(1, total // 10), min(1500, total // 10)
        return dict(
            max_iters=total,
            train_cfg=dict(max_iters=Reference('max_iters'), val_interval=every),
            param_scheduler=[
                dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=warm),
                dict(type='PolyLR', power=0.9, eta_min=0.0, by_epoch=False, begin=warm, end=Reference('max_iters')),
            ],
            default_hooks=dict(checkpoint=dict(interval=every, save_best='mIoU', max_keep_ckpts=2)),
        )
    steps, least = math.ceil(steps), 12 if task == 'detection' else 30
    epochs = max(least, min(100, math.ceil(2000 / steps)))
    every, warm = max(1, epochs // 12), max(1, min(500, epochs * steps // 10))
    warming = dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=warm)
    if task == 'detection':
        best, kind = 'coco/bbox_mAP', 'MultiStepLR'
        more = dict(milestones=[epochs * 2 // 3, epochs * 11 // 12], gamma=0.1)
    else:
        best, kind = 'accuracy/top1', 'CosineAnnealingLR'
        more = dict(eta_min_ratio=0.01, T_max=Reference('max_epochs'), convert_to_iter_based=True)
    falling = dict(type=kind, by_epoch=True, begin=0, end=Reference('max_epochs'), **more)
    return dict(
        max_epochs=epochs,
        train_cfg=dict(max_epochs=Reference('max_epochs'), val_interval=every),
        param_scheduler=[warming, falling],
        default_hooks=dict(checkpoint=dict(interval=every, save_best=best, max_keep_ckpts=2)),
    )
