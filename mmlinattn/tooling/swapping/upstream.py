# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read upstream configs: the network around the backbone, and the images."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from mmengine.config import Config
from mmengine.registry import init_default_scope

from ...utils.errors import RunError
from ...utils.registering import bare_name
from ..configs import PIP_NAMES, find_config, read_config
from ..images import image_channels, test_size
from ..settings import leaves

# beginnings of the names of backbones that only their own heads can read
_OWN_HEADS = dict(
    HourglassNet='an hourglass gives equal maps of one stride, each supervised by a head of its own',
    TridentResNet='its head reads three branches of shared weights, which only TridentResNet has',
    DetectoRS='its recursive pyramid feeds the feature maps of the neck back into this backbone',
)


class Unsupported(RunError):
    """Raised if a network cannot use another backbone; the message says why."""

    def __init__(self, config: str, reason: str) -> None:
        super().__init__(f'{config}: no other backbone fits: {reason}')


class NoModel(RunError):
    """Raised for a config without a model, a base of other configs."""


class Upstream(NamedTuple):
    """An upstream config.

    Attributes:
        base: Name for ``_base_``: ``mmdet::...`` or an absolute path.
        cfg: The config as inherited.
        task: ``'mmdet'``, ``'mmseg'`` or ``'mmpretrain'``.
        inner: Part of the model with the backbone: ``'detector'`` of trackers and semi-supervised training.
        is_whole: The config is pure Python. No text config can inherit it, so the written file holds all of it.
    """

    base: str
    cfg: Config
    task: str
    inner: str = ''
    is_whole: bool = False

    @property
    def model(self) -> dict:
        """Copy of the model's config as Python's own dicts, with MMPretrain's preprocessor inside."""
        cfg = self.cfg.to_dict()
        if cfg.get('data_preprocessor'):
            cfg['model'].setdefault('data_preprocessor', cfg['data_preprocessor'])
        return cfg['model']

    @property
    def network(self) -> dict:
        """Part of the model's config that has ``backbone`` and ``neck``, see :func:`split_encoder`."""
        return split_encoder(self.model[self.inner] if self.inner else self.model)

    @property
    def has_masks(self) -> bool:
        """True if the training data has masks."""
        steps = dicts(self.cfg.get('train_dataloader'))
        # LoadPanopticAnnotations loads them by default
        return any(step.get('with_mask') or bare_name(step.get('type')) == 'LoadPanopticAnnotations' for step in steps)

    @property
    def image_channels(self) -> int:
        return image_channels(Config(dict(default_scope=self.task, model=self.network)))

    @property
    def image_size(self) -> Optional[tuple[int, int]]:
        """Height and width of the images that enter the model, at least 32; None if they depend on the image."""
        size = (self.network.get('data_preprocessor') or {}).get('size') or test_size(self.cfg)
        return (max(size[0], 32), max(size[1], 32)) if size else None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Image sizes (height, width) to try: a small one and the fixed size of the config; only the latter if it is at
        most 320."""
        fixed = self.image_size
        if fixed and max(fixed) <= 320:
            return [fixed]
        side = 320 if self.task == 'mmdet' else 256  # the coarsest feature map of a detector has stride 128
        return [(side, side), fixed] if fixed else [(side, side)]


def listed(part: Any) -> list:
    """Return necks, heads or hooks of a config as a list; they may be a dict, a list of dicts or None."""
    if isinstance(part, (list, tuple)):
        return list(part)
    return [part] if part else []


def split_encoder(network: dict) -> dict:
    """Return a network with ``backbone`` and ``neck`` in place of a list in ``image_encoder`` (retrievers)."""
    if not isinstance(network.get('image_encoder'), (list, tuple)):
        return network
    backbone, *neck = network['image_encoder']
    rest = {key: value for key, value in network.items() if key != 'image_encoder'}
    return {**rest, 'backbone': backbone, 'neck': neck}


def join_encoder(network: dict) -> dict:
    """Return a network for its class to build: the inverse of :func:`split_encoder`."""
    if bare_name(network.get('type')) != 'ImageToImageRetriever':
        return network
    rest = {key: value for key, value in network.items() if key not in ('backbone', 'neck')}
    return {**rest, 'image_encoder': [network['backbone'], *network['neck']]}


def dicts(node: Any) -> Iterator[dict]:
    """Yield all dicts in a part of a config, outer ones first."""
    return (each for _, each in leaves([node]) if isinstance(each, dict))


def read_upstream(spec: str) -> Upstream:
    """Read a config of MMDetection, MMSegmentation or MMPretrain: an address (``mmdet::FOLDER/CONFIG.py``) or a path.

    Raises:
        RunError: The config is missing, not readable, or of another project.
        NoModel: The config has no model; others inherit it.
        Unsupported: The model has no backbone of a known kind.
    """
    file = find_config(spec, 'UPSTREAM')
    scope, is_address, name = spec.partition('::')
    # MMEngine accepts folders of letters only; gn+ws and legacy_1.x are reached through `_base_`
    base = spec if re.match(r'\w+::\w+/', spec) else f'{scope}::_base_/../{name}' if is_address else str(file.resolve())
    cfg, is_whole = read_config(str(file)), Config._is_lazy_import(str(file))
    task = cfg.get('default_scope') or scope
    if task not in PIP_NAMES:
        raise RunError(f'{spec}: default_scope={cfg.get("default_scope")!r}: expected one of {tuple(PIP_NAMES)}')
    cfg = Config(cfg.to_dict()) if is_whole else cfg  # classes by their paths
    model = cfg.get('model')
    if not isinstance(model, dict):
        raise NoModel(f'{spec} has no model: it is a part that other configs inherit')
    for inner in ('', 'detector'):
        network: Any = model.get(inner) if inner else model
        backbone = split_encoder(network).get('backbone') if isinstance(network, dict) else None
        if isinstance(backbone, dict) and backbone.get('type'):  # Detectron2's and Hugging Face's have none
            for kind, reason in _OWN_HEADS.items():
                if bare_name(backbone['type']).startswith(kind):
                    raise Unsupported(spec, reason)
            init_default_scope(task)
            return Upstream(base, cfg, task, inner, is_whole)
    raise Unsupported(spec, f'{bare_name(model.get("type"))} has no backbone of its own to build')
