# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings of a swapped config beside the model: hooks, imports, optimizer, schedules, preprocessing of images."""

from typing import Any, Optional

from mmengine.config import Config

from ...utils.errors import RunError
from ...utils.files import project_files
from ...utils.registering import bare_name
from ..configs import LOADERS
from .upstream import Upstream, find_dict
from .zoo import ZooBackbone, recipe

# What the released weights were trained with: ImageNet's, RGB
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def normalise(model: dict, task: str) -> None:
    """Images as the released weights know them, in every preprocessor of a model."""
    for key, value in model.items():
        if not isinstance(value, dict):
            continue
        if key != 'data_preprocessor' or isinstance(value.get('data_preprocessor'), dict):
            normalise(value, task)
            continue
        mean = value.get('mean')
        if isinstance(mean, (list, tuple)) and len(mean) != 3:
            continue  # grey images
        flag = next((name for name in ('to_rgb', 'bgr_to_rgb') if name in value), None)
        flag = flag or ('to_rgb' if task == 'mmpretrain' else 'bgr_to_rgb')
        # means that fall are in the order RGB: images come so, where nothing turns them
        is_rgb = isinstance(mean, (list, tuple)) and list(mean) == sorted(mean, reverse=True) and len(set(mean)) == 3
        is_rgb ^= bool(value.pop('rgb_to_bgr', False))
        value.update({'mean': MEAN, 'std': STD, flag: bool(value.get(flag)) or not is_rgb})


def check_pipelines(cfg: Config) -> None:
    """Refuse images that a pipeline has normalised: the weights' preprocessor would do it again.

    Raises:
        RunError: A data set of ``cfg`` has ``Normalize`` in its pipeline.
    """
    loaders = cfg.to_dict()
    for loader in LOADERS:
        if find_dict(loaders.get(loader), dict(type='Normalize')):
            raise RunError(
                f'{loader} has Normalize in its pipeline, as configs of MMDetection 2 and MMSegmentation 0 do; with '
                'ImageNet weights images would be normalised twice. Write its mean, std and to_rgb into '
                'data_preprocessor (there bgr_to_rgb, of classifiers to_rgb), and take it out of the pipelines.'
            )


def settings_for(source: Upstream, new: ZooBackbone, keep_optimizer: bool) -> tuple[dict, list[str]]:
    """The settings of the file beside the model: hooks, imports, the optimizer."""
    settings: dict[str, Any] = {}
    remarks: list[str] = []
    imports = (source.cfg.get('custom_imports') or {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else imports
    settings['custom_imports'] = dict(
        imports=[*(name for name in imports if name != 'mmlinattn'), 'mmlinattn'], allow_failed_imports=False
    )
    runtime = Config.fromfile(str(project_files('configs') / '_base_' / 'default_runtime.py'))
    hooks = source.cfg.to_dict().get('custom_hooks') or []
    known = {bare_name(hook['type']) for hook in hooks}  # as where it was swapped before
    settings['custom_hooks'] = hooks + [each for each in runtime.to_dict()['custom_hooks'] if each['type'] not in known]
    settings['runner_type'] = source.cfg.get('runner_type', runtime.runner_type)
    if source.cfg.get('load_from') is not None:
        settings['load_from'] = None
    upstream = source.cfg.to_dict().get('optim_wrapper') or {}
    if keep_optimizer or not upstream.get('optimizer'):
        return settings, remarks
    head = source.model.get('decode_head')
    head = head[0] if isinstance(head, (list, tuple)) else head
    kinds = source.model.get('type'), head.get('type') if isinstance(head, dict) else None
    preferred = 'fpn_80k' if 'FPNHead' in kinds else 'retinanet_1x' if 'RetinaNet' in kinds else ''
    paper = recipe(new.name, source.task, preferred)
    ours = paper.optim_wrapper.to_dict()
    ours['optimizer'].pop('_scope_', None)
    wrapper: dict[str, Any] = dict(
        type='OptimWrapper', constructor='MergedOptimWrapperConstructor', optimizer=ours['optimizer']
    )
    # what upstream says of its own heads stays; the backbone trains at the full rate, as the paper has it
    theirs, paramwise = upstream.get('paramwise_cfg') or {}, dict(ours.get('paramwise_cfg') or {})
    keys = {key: value for key, value in theirs.get('custom_keys', {}).items() if not key.startswith('backbone')}
    keys.update(paramwise.get('custom_keys') or {})
    if keys:
        paramwise['custom_keys'] = keys
    if theirs.get('bypass_duplicate'):
        paramwise['bypass_duplicate'] = True  # its neck or head shares modules
    if paramwise:
        wrapper['paramwise_cfg'] = paramwise
    for key in ('clip_grad', 'accumulative_counts'):
        value = upstream.get(key) or ours.get(key)
        if value is not None:
            wrapper[key] = value
    settings['optim_wrapper'] = wrapper
    if bare_name(upstream.get('type')) == 'AmpOptimWrapper':
        remarks.append('mixed precision is a switch of the tools here (--amp), so that the file also trains on a CPU')
    batch = (paper.get('auto_scale_lr') or {}).get('base_batch_size', 16)
    settings['auto_scale_lr'] = dict(base_batch_size=batch)
    remarks.append(f'the learning rate is for {batch} images a step (--auto-scale-lr scales it)')
    schedulers = _rescaled(source.cfg, wrapper['optimizer']['lr'] / upstream['optimizer'].get('lr', 1.0))
    if schedulers is not None:
        settings['param_scheduler'] = schedulers
    return settings, remarks


def _rescaled(cfg: Config, factor: float) -> Optional[list]:
    """Schedules that end at a rate of their own, in proportion to the new one; None where none does."""
    given = cfg.to_dict().get('param_scheduler') or []
    schedulers = [given] if isinstance(given, dict) else list(given)
    ends = [(each, key) for each in schedulers for key in ('eta_min', 'eta_max') if each.get(key)]
    for each, key in ends:
        each[key] = float(f'{each[key] * factor:.3g}')
    for each in schedulers:
        each.pop('_scope_', None)
    return schedulers if ends and factor != 1 else None
