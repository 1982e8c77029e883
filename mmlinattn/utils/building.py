# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Build models of configs without reading pretrained weights."""

import copy
import os
from typing import Any, Optional

from mmengine.config import Config, ConfigDict
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from .errors import RunError, described
from .registering import bare_name


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside the wrappers of distributed training and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def scope_of(cfg: Config) -> Optional[str]:
    """Return ``default_scope`` of a config, or in pure Python configs the package of the model's class; None if
    unknown."""
    model = cfg.get('model')
    kind = model.get('type') if isinstance(model, dict) else None
    modules = [base.__module__ for base in kind.__mro__] if isinstance(kind, type) else [str(kind)]
    projects = (module.split('.')[0] for module in modules)
    return cfg.get('default_scope') or next(
        (name for name in projects if name in ('mmdet', 'mmseg', 'mmpretrain')), None
    )


def is_pretrained(init_cfg: Any) -> bool:
    """Return True if ``init_cfg``, or one of its entries, loads a checkpoint. ``type`` may be a name, a class or a
    path."""
    entries = init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]
    kinds = (bare_name(entry.get('type')) for entry in entries if isinstance(entry, dict))
    return any(kind in ('Pretrained', 'PretrainedInit') for kind in kinds)


def without_pretrained(node: Any) -> Any:
    """Copy a config, or a part of it, and remove the settings that read checkpoints.

    ``teacher_ckpt`` is removed too: MMDetection's distillation reads it when the model is built.
    """
    if isinstance(node, dict):
        node = type(node)((key, without_pretrained(value)) for key, value in node.items())
        for key in ('pretrained', 'teacher_ckpt'):
            if isinstance(node.get(key), str):
                node[key] = None
        if is_pretrained(node.get('init_cfg')):
            node['init_cfg'] = None
    elif isinstance(node, (list, tuple)):
        return type(node)(map(without_pretrained, node))
    return node


def build_model(cfg: Config, pretrained: bool = False) -> nn.Module:
    """Build the model of a config, without initialising its weights. The config stays as it is.

    Args:
        cfg (Config): Config of a detector, segmentor or classifier.
        pretrained (bool): Keep checkpoints of ``init_cfg``, for ``init_weights`` and adapters. If False, no checkpoint
            is read or downloaded.

    Raises:
        RunError: The config has no model, or a module does not take its arguments. With ``MMLINATTN_TRACEBACK=1`` the
            error of the module is raised unchanged.
    """
    name = cfg.filename or 'the config'
    if not isinstance(cfg.get('model'), dict):
        raise RunError(f'{name} has no model')
    init_default_scope(scope_of(cfg) or 'mmengine')
    given = cfg.model.to_dict()
    model = ConfigDict(given if pretrained else without_pretrained(given))
    model.setdefault('data_preprocessor', copy.deepcopy(cfg.get('data_preprocessor')))  # classifiers add keys
    try:
        return MODELS.build(model)
    except Exception as error:  # a wrong argument shows in errors of any kind
        if os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        raise RunError(
            f'the model of {name} cannot be built: {described(error)} (MMLINATTN_TRACEBACK=1 shows where)'
        ) from error
