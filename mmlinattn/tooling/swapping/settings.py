# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings of a swapped config beside its model: hooks, imports, optimizer, schedules, normalisation of images."""

from typing import Any

from mmengine.config import Config

from ...utils.errors import RunError
from ...utils.registering import bare_name
from ..configs import LOADERS
from .upstream import Upstream, dicts, listed
from .zoo import ZooBackbone, recipe

# ImageNet's mean and standard deviation of the released weights, RGB
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
# type of detector or head: the recipe of the paper that trained one
_RECIPES = (('FPNHead', 'fpn_80k'), ('RetinaNet', 'retinanet_1x'))


def normalise(model: dict, task: str) -> None:
    """Set mean, standard deviation and channel order of the released weights in every preprocessor of a model."""
    for node in dicts(model):
        value = node.get('data_preprocessor')
        if not isinstance(value, dict) or isinstance(value.get('data_preprocessor'), dict):  # the latter: a wrapper's
            continue
        mean = value.get('mean')
        mean = list(mean) if isinstance(mean, (list, tuple)) else []
        if mean and len(mean) != 3:
            continue  # grey images
        flag = next((name for name in ('to_rgb', 'bgr_to_rgb') if name in value), None)
        flag = flag or ('to_rgb' if task == 'mmpretrain' else 'bgr_to_rgb')
        # means in descending order are RGB: the order of the images, if nothing converts it
        is_rgb = mean == sorted(mean, reverse=True) and len(set(mean)) == 3
        is_rgb ^= bool(value.pop('rgb_to_bgr', False))
        value.update({'mean': MEAN, 'std': STD, flag: bool(value.get(flag)) or not is_rgb})


def check_pipelines(cfg: Config) -> None:
    """Raise a RunError if a pipeline normalises images, as the data preprocessor would normalise them again."""
    for loader in LOADERS:
        if any(bare_name(step.get('type')) == 'Normalize' for step in dicts(cfg.to_dict().get(loader))):
            twice = 'Normalize in the pipeline (MMDetection 2, MMSegmentation 0) would normalise images twice'
            remedy = 'Move its mean, std and to_rgb to data_preprocessor (bgr_to_rgb, to_rgb in classifiers).'
            raise RunError(f'{loader}: {twice}. {remedy}')


def settings_for(source: Upstream, new: ZooBackbone, keep_optimizer: bool) -> tuple[dict, list[str]]:
    """Return the settings of the written config beside its model, and notes for the user.

    These are imports, and ``load_from=None`` if upstream loads a model. Without ``keep_optimizer``, they include the
    optimizer, the batch size of its learning rate, and schedules with absolute learning rates scaled.
    """
    cfg = source.cfg.to_dict()
    imports = (cfg.get('custom_imports') or {}).get('imports', [])
    imports = [name for name in ([imports] if isinstance(imports, str) else imports) if name != 'mmlinattn']
    settings: dict[str, Any] = dict(custom_imports=dict(imports=[*imports, 'mmlinattn'], allow_failed_imports=False))
    if cfg.get('load_from') is not None:
        settings['load_from'] = None  # weights of the whole upstream model
    if keep_optimizer or not (cfg.get('optim_wrapper') or {}).get('optimizer'):
        return settings, []
    kinds = [source.model.get('type'), *(head.get('type') for head in listed(source.model.get('decode_head'))[:1])]
    preferred = next((recipe for kind, recipe in _RECIPES if kind in kinds), '')
    paper = recipe(new.name, source.task, preferred)
    upstream, wrapper = cfg['optim_wrapper'], _optim_wrapper(cfg['optim_wrapper'], paper.optim_wrapper.to_dict())
    batch = (paper.get('auto_scale_lr') or {}).get('base_batch_size', 16)
    settings.update(optim_wrapper=wrapper, auto_scale_lr=dict(base_batch_size=batch))
    factor, schedulers = wrapper['optimizer']['lr'] / upstream['optimizer'].get('lr', 1.0), cfg.get('param_scheduler')
    ends = [(each, key) for each in listed(schedulers) for key in ('eta_min', 'eta_max') if each.get(key)]
    if ends and factor != 1:
        for each, key in ends:
            each[key] = float(f'{each[key] * factor:.3g}')
        settings['param_scheduler'] = [{k: v for k, v in each.items() if k != '_scope_'} for each in listed(schedulers)]
    remarks = [f'the learning rate is for {batch} images per step (--auto-scale-lr scales it)']
    if bare_name(upstream.get('type')) == 'AmpOptimWrapper':
        remarks.insert(0, 'mixed precision is an option of the tools (--amp), so that the file also trains on a CPU')
    return settings, remarks


def _optim_wrapper(upstream: dict, ours: dict) -> dict[str, Any]:
    """Return the optimizer of the paper (``ours``) with the settings that ``upstream`` has for its own heads. The
    backbone trains at the full rate."""
    ours['optimizer'].pop('_scope_', None)
    theirs, paramwise = upstream.get('paramwise_cfg') or {}, dict(ours.get('paramwise_cfg') or {})
    keys = {key: value for key, value in theirs.get('custom_keys', {}).items() if not key.startswith('backbone')}
    keys.update(paramwise.get('custom_keys') or {})
    if keys:
        paramwise['custom_keys'] = keys
    if theirs.get('bypass_duplicate'):
        paramwise['bypass_duplicate'] = True  # its neck or head shares modules
    merged = {key: upstream.get(key) or ours.get(key) for key in ('clip_grad', 'accumulative_counts')}
    optional = {key: value for key, value in dict(paramwise_cfg=paramwise, **merged).items() if value}
    constructor = 'MergedOptimWrapperConstructor'
    return dict(type='OptimWrapper', constructor=constructor, optimizer=ours['optimizer'], **optional)
