# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The model of a config, for tools that bring weights of their own or need none."""

import os
from typing import Any, Optional

from mmengine.config import Config, ConfigDict
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from .errors import RunError, described
from .registering import bare_name


def unwrapped(model: Any) -> nn.Module:
    """The model itself, without what distributed training and test-time augmentation put around it."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def scope_of(cfg: Config) -> Optional[str]:
    """``default_scope``, or of a config without one, as those of the pure Python style, the project of its model's
    class."""
    model = cfg.get('model')
    kind = model.get('type') if isinstance(model, dict) else None
    places = [base.__module__ for base in kind.__mro__] if isinstance(kind, type) else [str(kind)]
    projects = (place.split('.')[0] for place in places)
    return cfg.get('default_scope') or next(
        (name for name in projects if name in ('mmdet', 'mmseg', 'mmpretrain')), None
    )


def is_pretrained(init_cfg: Any) -> bool:
    """Whether an ``init_cfg`` of MMEngine, or one of several, names a checkpoint: by MMEngine's name for it, by the
    class, or by where the class is, as configs of the pure Python style are written and dumped."""
    entries = init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]
    kinds = (bare_name(entry.get('type')) for entry in entries if isinstance(entry, dict))
    return any(kind in ('Pretrained', 'PretrainedInit') for kind in kinds)


def without_pretrained(node: Any) -> Any:
    """A config, or a part of one, without weights to fetch; what is not to be changed is copied.

    ``teacher_ckpt`` goes too: MMDetection's distillation reads it when it is built.
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
    """The model of a config as its constructors leave it.

    Args:
        cfg (Config): Of a detector, segmentor or classifier.
        pretrained (bool): Keep what names a checkpoint, for ``init_weights``; some constructors, of adapters, read it.
            Without, nothing is read or downloaded.

    Raises:
        RunError: The config has no model, or a part of it refuses its arguments; ``MMLINATTN_TRACEBACK=1`` keeps errors
            of parts as they are.
    """
    name = cfg.filename or 'the config'
    if not isinstance(cfg.get('model'), dict):
        raise RunError(f'{name} has no model')
    init_default_scope(scope_of(cfg) or 'mmengine')
    given = cfg.model.to_dict()
    model = ConfigDict(given if pretrained else without_pretrained(given))
    model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    try:
        return MODELS.build(model)
    except Exception as error:  # a wrong argument shows in errors of any kind
        if os.environ.get('MMLINATTN_TRACEBACK') == '1':
            raise
        raise RunError(
            f'the model of {name} cannot be built: {described(error)} (MMLINATTN_TRACEBACK=1 shows where)'
        ) from error
