# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""An upstream config: where its backbone is, and which maps that gives."""

import difflib
import inspect
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import get_installed_path

from ..checkpoints.loading import is_pretrained
from ..engine.cli import PIP_NAMES
from ..utils.errors import RunError
from ..utils.registering import bare_name
from .zoo import FeatureMap, plain_dict

# Backbones that only their own heads understand, and why
_OWN_HEADS = {
    'HourglassNet': 'an hourglass gives equal maps of one stride, each supervised by a head of its own',
    'TridentResNet': 'its head reads three branches of shared weights, which only TridentResNet has',
    'DetectoRS_ResNet': 'its recursive pyramid feeds the maps of the neck back into this backbone',
    'DetectoRS_ResNeXt': 'its recursive pyramid feeds the maps of the neck back into this backbone',
}


class NoPlace(RunError):
    """A network that has no place for a pyramid of maps; the message says why."""


class NoModel(RunError):
    """A config that is a part of others: it holds no model."""


class Upstream(NamedTuple):
    """An upstream config.

    Attributes:
        base: What a config inherits it by: ``mmdet::...`` or an absolute path.
        cfg: As inherited.
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.
        path: Keys from ``model`` to the network that holds ``backbone``: () or, of trackers and semi-supervised
            training, ('detector',).
    """

    base: str
    cfg: Config
    task: str
    path: tuple[str, ...]

    @property
    def model(self) -> dict:
        """The model as Python's own dicts, a copy."""
        model = plain_dict(self.cfg.model)
        preprocessor = self.cfg.get('data_preprocessor')
        if preprocessor is not None and not model.get('data_preprocessor'):
            model['data_preprocessor'] = plain_dict(preprocessor)
        return model

    @property
    def has_masks(self) -> bool:
        """Whether the training data has masks."""
        return _find(self.cfg.get('train_dataloader'), dict(with_mask=True)) is not None

    @property
    def image_channels(self) -> int:
        """Of the pictures: 3, unless the backbone or the means of the preprocessor say otherwise (grey ones)."""
        network = self.network(self.model)
        given = network['backbone'].get('in_channels')
        if isinstance(given, int):
            return given
        mean = (network.get('data_preprocessor') or {}).get('mean')
        return 1 if isinstance(mean, (list, tuple)) and len(mean) == 1 else 3

    @property
    def image_size(self) -> Optional[tuple[int, int]]:
        """Height and width that the pictures have in training whatever they had before; None where the recipe leaves
        them open."""
        given = (self.network(self.model).get('data_preprocessor') or {}).get('size')
        if not given:
            resized = _find(self.cfg.get('train_dataloader'), dict(type='Resize', keep_ratio=False))
            given = resized and resized.get('scale')
            given = given[::-1] if isinstance(given, (list, tuple)) else None  # width first
        if isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(side, int) for side in given):
            return (given[0], given[1])
        return None

    def network(self, model: dict) -> dict:
        """The part of a model that holds the backbone."""
        for key in self.path:
            model = model[key]
        return model


def _find(node: Any, wanted: dict) -> Optional[dict]:
    """The first dict inside that has these values."""
    if isinstance(node, dict):
        if all(key in node and node[key] == value for key, value in wanted.items()):
            return node
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        return next(filter(None, (_find(item, wanted) for item in node)), None)
    return None


def read_upstream(spec: str) -> Upstream:
    """Read an upstream config.

    Args:
        spec: ``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py`` or a path.

    Raises:
        RunError: It is not there, not readable, or of another project.
        NoModel: It is a part of others.
        NoPlace: Its model has no backbone that gives maps.
    """
    base = _base(spec)
    try:
        cfg = inherit(base)
    except Exception as error:  # a config is a program
        raise RunError(f'{spec} cannot be read: {type(error).__name__}: {error}') from error
    task = cfg.get('default_scope') or spec.partition('::')[0]
    if task not in PIP_NAMES:
        raise RunError(f'{spec} has default_scope {task!r}; allowed are: {", ".join(PIP_NAMES)}')
    model = cfg.get('model')
    if not isinstance(model, dict):
        raise NoModel(f'{spec} has no model: it is a part that other configs inherit')
    for path in ((), ('detector',)):
        network: Any = model
        for key in path:
            network = network.get(key)
        if isinstance(network, dict) and isinstance(network.get('backbone'), dict):
            kind = bare_name(network['backbone'].get('type'))
            if kind == 'None':
                raise NoPlace(
                    f'{spec} has no place for another backbone: {model.get("type")} does not build its own from a type'
                )
            if kind in _OWN_HEADS:
                raise NoPlace(f'{spec} has no place for a pyramid: {_OWN_HEADS[kind]}')
            init_default_scope(task)
            return Upstream(base, cfg, task, path)
    kinds = [str(key) for key in model if 'encoder' in key or 'backbone' in key or 'language' in key]
    raise NoPlace(
        f'{spec} has no place for a pyramid: {model.get("type")} has no backbone of its own'
        + (f' (it has {", ".join(kinds)})' if kinds else '')
    )


def inherit(base: str) -> Config:
    """What a config that only inherits ``base`` holds."""
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder, 'child.py')
        child.write_text(f'_base_ = {base!r}\n', encoding='utf-8')
        return Config.fromfile(str(child))


def _base(spec: str) -> str:
    if '::' not in spec:
        path = Path(spec).expanduser()
        if not path.is_file():
            raise RunError(f'UPSTREAM is {spec!r}: no such file (of an installed project: mmdet::FOLDER/CONFIG.py)')
        base = str(path.resolve())
    else:
        scope, _, name = spec.partition('::')
        if scope not in PIP_NAMES:
            raise RunError(f'UPSTREAM is {spec!r}; allowed before :: are: {", ".join(PIP_NAMES)}')
        try:
            root = Path(get_installed_path(scope), '.mim', 'configs')
        except Exception as error:
            raise RunError(f'{spec} needs {scope}, which is not installed: pip install {PIP_NAMES[scope]}') from error
        if not (root / name).is_file():
            there = [path.relative_to(root).as_posix() for path in root.glob('*/*.py')]
            close = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
            hint = f'; did you mean {" or ".join(f"{scope}::{other}" for other in close)}?' if close else ''
            raise RunError(f'UPSTREAM is {spec!r}, and {scope} has no such config{hint}')
        # MMEngine takes folders of plain letters only: gn+ws and legacy_1.x by way of one that is
        base = spec if re.match(r'\w+::\w+/', spec) else f'{scope}::_base_/../{name}'
    file = base if '::' not in spec else str(root / name)
    if Config._is_lazy_import(file):
        raise RunError(
            f'{spec} is written in pure Python, which MMEngine does not inherit by name: use its text config'
        )
    return base


def without_weights(node: Any) -> Any:
    """A config of a model that loads nothing."""
    if isinstance(node, dict):
        return {
            key: without_weights(value)
            for key, value in node.items()
            if not (key == 'init_cfg' and is_pretrained(value)) and not (key == 'pretrained' and isinstance(value, str))
        }
    if isinstance(node, (list, tuple)):
        return type(node)(without_weights(item) for item in node)
    return node


class Measured(NamedTuple):
    """What an upstream backbone returns.

    Attributes:
        maps: Channels and strides.
        alone: Position of the only map that it returns in inference, not in a tuple; None where both are alike.
    """

    maps: list[FeatureMap]
    alone: Optional[int] = None


def measure(upstream: Upstream) -> Measured:
    """Channels and stride of what the upstream backbone returns, found by running it on noise.

    Raises:
        NoPlace: It is one of masked image modelling, or gives neither maps nor tokens.
        RunError: It cannot be built or run here.
    """
    network = upstream.network(upstream.model)
    cfg = without_weights(network['backbone'])
    if cfg.get('output_cls_token'):
        raise NoPlace(f'{upstream.base} has no place for a pyramid: its head reads a class token beside each map')
    if upstream.task == 'mmpretrain' and network.get('type') == 'ImageClassifier' and not network.get('head'):
        raise NoPlace(f'{upstream.base} has no place for another backbone: it has no head, so that nothing trains')
    init_default_scope(upstream.task)
    with MODELS.switch_scope_and_registry(None) as registry:  # that of the default scope
        kind = registry.get(cfg['type'])
    hidden = {'mask', 'masks', 'ids_restore', 'importance'}
    hides = hidden & set(inspect.signature(kind.forward).parameters) if kind else False
    if hides or network.get('type') == 'SparK':
        raise NoPlace(
            f'{upstream.base} has no place for a pyramid: masked image modelling hides tokens from {cfg["type"]}'
        )
    try:
        backbone = MODELS.build(ConfigDict(cfg))
    except Exception as error:
        guessed = _guess(network)
        if guessed:
            return Measured(guessed)
        why = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise RunError(f'the backbone of {upstream.base} cannot be built here: {why[:300]}') from error
    backbone.eval()
    channels = upstream.image_channels
    size = cfg.get('img_size') or cfg.get('pretrain_img_size')
    size = size if isinstance(size, (list, tuple)) else (size, size)
    reason: Optional[Exception] = None
    for sides in ((256, 256), size, (224, 224), (512, 512), (32, 32)):
        if not all(isinstance(side, int) for side in sides):
            continue
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter('ignore')
                outs = backbone(torch.rand(2, channels, *sides))
        except Exception as error:
            reason = reason or error
            continue
        found = _maps(outs, sides[0])
        if found:
            branches = _branches(backbone, torch.rand(2, channels, *sides)) if isinstance(outs, torch.Tensor) else []
            alike = [i for i, branch in enumerate(branches) if branch == found[0]]
            return Measured(branches, alike[0]) if len(alike) == 1 and len(branches) > 1 else Measured(found)
        raise NoPlace(f'{upstream.base} has no place for a pyramid: {cfg["type"]} returns no maps or tokens')
    text = ' '.join(f'{type(reason).__name__}: {reason}'.split())
    raise RunError(f'the backbone of {upstream.base} does not run here: {text[:300]}')


def _branches(backbone: torch.nn.Module, image: torch.Tensor) -> list[FeatureMap]:
    """The maps in training of a backbone that gives a single one in inference; none where it does not run so."""
    backbone.train()
    try:
        with torch.no_grad():
            outs = backbone(image)
    except Exception:  # batch norms of one pixel and the like: it is taken for what it is in inference
        return []
    return _maps(outs, image.shape[2]) if isinstance(outs, (list, tuple)) else []


def _maps(outs: Any, side: int) -> list[FeatureMap]:
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    found = []
    for out in outs:
        if isinstance(out, (list, tuple)) and out and isinstance(out[0], torch.Tensor):
            out = out[0]  # a map and its class token
        if not isinstance(out, torch.Tensor):
            return []
        if out.dim() == 4:
            found.append(FeatureMap(out.shape[1], max(1, round(side / out.shape[2]))))
        elif out.dim() in (2, 3):
            found.append(FeatureMap(out.shape[-1], None))
        else:
            return []
    return found


def _guess(network: dict) -> list[FeatureMap]:
    """Maps of a backbone that cannot be built (its package is missing), from what the neck reads: up to stride 32."""
    neck = network.get('neck')
    neck = neck[0] if isinstance(neck, (list, tuple)) and neck else neck
    channels = neck.get('in_channels') if isinstance(neck, dict) else None
    if not isinstance(channels, (list, tuple)) or not 1 <= len(channels) <= 4:
        return []
    return [FeatureMap(dim, 32 // 2 ** (len(channels) - 1 - i)) for i, dim in enumerate(channels)]
