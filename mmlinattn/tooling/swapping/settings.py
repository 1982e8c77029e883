# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings of a swapped config beside the network: hooks, imports, optimizer, schedules, normalisation of images."""

from typing import Any

from mmengine.config import Config

from ...utils.errors import RunError
from ...utils.registering import bare_name
from ..configs import LOADERS
from .upstream import Upstream, find_dict, listed
from .zoo import ZooBackbone, recipe

# ImageNet's mean and standard deviation of the released weights, RGB
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def normalise(model: dict, task: str) -> None:
    """Set mean, standard deviation and channel order of the released weights in every preprocessor of a model."""
    for key, value in model.items():
        if not isinstance(value, dict):
            continue
        if key != 'data_preprocessor' or isinstance(value.get('data_preprocessor'), dict):
            normalise(value, task)
            continue
        mean = value.get('mean')
        mean = list(mean) if isinstance(mean, (list, tuple)) else []
        if mean and len(mean) != 3:
            continue  # grey images
        flag = next((name for name in ('to_rgb', 'bgr_to_rgb') if name in value), None)
        flag = flag or ('to_rgb' if task == 'mmpretrain' else 'bgr_to_rgb')
        # falling means are in the order RGB: images come so if nothing turns them
        is_rgb = mean == sorted(mean, reverse=True) and len(set(mean)) == 3
        is_rgb ^= bool(value.pop('rgb_to_bgr', False))
        value.update({'mean': MEAN, 'std': STD, flag: bool(value.get(flag)) or not is_rgb})


def check_pipelines(cfg: Config) -> None:
    """Refuse pipelines that normalise images: the preprocessor of the weights would normalise them again.

    Raises:
        RunError: A data set of ``cfg`` has ``Normalize`` in its pipeline.
    """
    for loader in LOADERS:
        if find_dict(cfg.to_dict().get(loader), dict(type='Normalize')):
            raise RunError(
                f'{loader}: Normalize in the pipeline (MMDetection 2, MMSegmentation 0) would normalise images twice. '
                'Move its mean, std and to_rgb to data_preprocessor (bgr_to_rgb, to_rgb in classifiers).'
            )


def settings_for(source: Upstream, new: ZooBackbone, keep_optimizer: bool) -> tuple[dict, list[str]]:
    """Return imports and optimizer of the file, and remarks on them."""
    cfg, remarks = source.cfg.to_dict(), list[str]()
    imports = (cfg.get('custom_imports') or {}).get('imports', [])
    imports = [name for name in ([imports] if isinstance(imports, str) else imports) if name != 'mmlinattn']
    settings: dict[str, Any] = dict(
        custom_imports=dict(imports=[*imports, 'mmlinattn'], allow_failed_imports=False),
    )
    if cfg.get('load_from') is not None:
        settings['load_from'] = None
    upstream = cfg.get('optim_wrapper') or {}
    if keep_optimizer or not upstream.get('optimizer'):
        return settings, remarks
    kinds = [source.model.get('type'), *(head.get('type') for head in listed(source.model.get('decode_head'))[:1])]
    preferred = 'fpn_80k' if 'FPNHead' in kinds else 'retinanet_1x' if 'RetinaNet' in kinds else ''
    paper = recipe(new.name, source.task, preferred)
    ours = paper.optim_wrapper.to_dict()
    ours['optimizer'].pop('_scope_', None)
    wrapper: dict[str, Any] = dict(
        type='OptimWrapper', constructor='MergedOptimWrapperConstructor', optimizer=ours['optimizer']
    )
    # upstream's settings of its own heads stay; the backbone trains at the full rate, as in the paper
    theirs, paramwise = upstream.get('paramwise_cfg') or {}, dict(ours.get('paramwise_cfg') or {})
    keys = {key: value for key, value in theirs.get('custom_keys', {}).items() if not key.startswith('backbone')}
    keys.update(paramwise.get('custom_keys') or {})
    if keys:
        paramwise['custom_keys'] = keys
    if theirs.get('bypass_duplicate'):
        paramwise['bypass_duplicate'] = True  # its neck or head shares modules
    merged = {key: upstream.get(key) or ours.get(key) for key in ('clip_grad', 'accumulative_counts')}
    wrapper.update({key: value for key, value in dict(paramwise_cfg=paramwise, **merged).items() if value})
    settings['optim_wrapper'] = wrapper
    if bare_name(upstream.get('type')) == 'AmpOptimWrapper':
        remarks.append('mixed precision is a switch of the tools here (--amp), so that the file also trains on a CPU')
    batch = (paper.get('auto_scale_lr') or {}).get('base_batch_size', 16)
    settings['auto_scale_lr'] = dict(base_batch_size=batch)
    remarks.append(f'the learning rate is for {batch} images a step (--auto-scale-lr scales it)')
    # schedules that end at a rate of their own follow the new rate
    factor = wrapper['optimizer']['lr'] / upstream['optimizer'].get('lr', 1.0)
    schedulers = listed(cfg.get('param_scheduler'))
    ends = [(each, key) for each in schedulers for key in ('eta_min', 'eta_max') if each.get(key)]
    if ends and factor != 1:
        for each, key in ends:
            each[key] = float(f'{each[key] * factor:.3g}')
        settings['param_scheduler'] = [{key: each[key] for key in each if key != '_scope_'} for each in schedulers]
    return settings, remarks
