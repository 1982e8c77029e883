# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Configs for tests, each loaded once, and models with or without initial weights."""

import copy
import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

ROOT = Path(__file__).parents[2]
CONFIG_DIR = ROOT / 'configs'
# small models for the shapes data sets: no rows of a paper
UNPUBLISHED = {f'{task}/ravlt_shapes_quickstart' for task in ('mmdet', 'mmseg', 'mmpretrain')}
CONFIGS = sorted(
    name for path in CONFIG_DIR.glob('mm*/*.py') if (name := f'{path.parent.name}/{path.stem}') not in UNPUBLISHED
)

# by parts of names of configs and released files
BACKBONES = dict(ravlt='RAVLT', pvt='LinearPVT', pvt_v2='LinearPVTv2', swin='LinearSwin', cswin='LinearCSWin')
BACKBONES.update(deit='LinearDeiT', nextvit='LinearNextViT')
SIZES = dict(t='tiny', s='small', m='medium', b='base', l='large')
_INITIALISERS = 'kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ uniform_ normal_'.split()


def configs_of(prefix: str) -> list[str]:
    return [name for name in CONFIGS if name.startswith(prefix)]


def one_size(names: list[str]) -> list:
    """Return parameters of a test: the first size of each backbone and recipe, and the others marked slow."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: '_t_' not in name):
        first.setdefault(re.sub(r'(_[tsmbl]|_b\d)(_384)?_', '_', name), name)
    fast = set(first.values())
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def load(name: str) -> Config:
    """Load the config ``task/name``; tests must not change it, as it is shared."""
    return Config.fromfile(CONFIG_DIR / f'{name}.py')


def build(name: str, random_init: bool = True, **options) -> tuple[nn.Module, Config]:
    """Return the model of the config ``task/name`` without pretrained weights, and the config.

    Without ``random_init``, memory is left uninitialised. ``options`` are ``--cfg-options``, with ``__`` for dots.
    """
    cfg = copy.deepcopy(load(name))  # cascades change lists of their training settings
    cfg.merge_from_dict({'model.backbone.init_cfg': None})
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in options.items()})
    return build_model(cfg, random_init), cfg


def build_model(cfg: Config, random_init: bool) -> nn.Module:
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))  # MMPretrain keeps it outside the model
    kept = {} if random_init else dict.fromkeys(_INITIALISERS, lambda tensor, *_, **__: tensor)
    with mock.patch.dict(vars(torch.nn.init), kept):
        return MODELS.build(cfg.model)


def without_gradient(model: nn.Module, cfg: Config) -> list[str]:
    """Return the parameters without gradient after a training step on two 64x64 images."""
    from mmlinattn.tooling.swapping import dummy_inputs  # needs the tasks' packages

    if cfg.default_scope == 'mmpretrain':
        batch = dummy_inputs.classification_batch((64, 64), cfg.model.head.num_classes)
    else:
        batches = dict(mmdet=dummy_inputs.detection_batch, mmseg=dummy_inputs.segmentation_batch)
        batch = batches[cfg.default_scope]((64, 64))
    model.train()
    loss, _ = model.parse_losses(model(**model.data_preprocessor(batch, training=True), mode='loss'))
    loss.backward()
    assert torch.isfinite(loss)
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]
