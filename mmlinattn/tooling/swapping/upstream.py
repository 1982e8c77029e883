# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""An upstream config: where its backbone is, and what its images are."""

import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple, Optional

import mmengine.registry
from mmengine.config import Config
from mmengine.registry import Registry, init_default_scope
from mmengine.utils import get_installed_path, get_object_from_string

from ...utils.errors import RunError
from ...utils.registering import bare_name
from ..configs import PIP_NAMES, read_config
from ..images import image_channels

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
        inner: Key of the part of the model that holds ``backbone``: 'detector' of trackers and semi-supervised
            training, else ''.
        is_whole: Whether it is in pure Python, which no text config inherits: the written file then holds all of it.
    """

    base: str
    cfg: Config
    task: str
    inner: str = ''
    is_whole: bool = False

    @property
    def model(self) -> dict:
        """The model as Python's own dicts, a copy."""
        cfg = self.cfg.to_dict()
        model = cfg['model']
        if cfg.get('data_preprocessor') and not model.get('data_preprocessor'):
            model['data_preprocessor'] = cfg['data_preprocessor']
        return model

    @property
    def has_masks(self) -> bool:
        """Whether the training data has masks."""
        loading = (dict(with_mask=True), dict(type='LoadPanopticAnnotations'))  # which loads them unasked
        return any(find_dict(self.cfg.get('train_dataloader'), wanted) is not None for wanted in loading)

    @property
    def image_channels(self) -> int:
        """The channels of the images."""
        return image_channels(Config(dict(default_scope=self.task, model=self.network(self.model))))

    @property
    def image_size(self) -> Optional[tuple[int, int]]:
        """Height and width that the training pipeline resizes or crops all images to, 32 at least; None where the
        recipe leaves them open."""
        given = (self.network(self.model).get('data_preprocessor') or {}).get('size')
        if not given:
            crops = ('RandomResizedCrop', 'RandomCrop', 'CenterCrop') if self.task == 'mmpretrain' else ()
            wanted: list[dict] = [dict(type=kind) for kind in crops]
            wanted += [dict(type='Resize') if self.task == 'mmpretrain' else dict(type='Resize', keep_ratio=False)]
            found = [find_dict(self.cfg.get('train_dataloader'), each) for each in wanted]
            given = next((each.get('crop_size', each.get('scale')) for each in found if each), None)
            given = given[::-1] if isinstance(given, (list, tuple)) else given and (given, given)  # width first
        if isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(side, int) for side in given):
            return max(given[0], 32), max(given[1], 32)
        return None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths to run it at: small ones, then the recipe's for what needs them."""
        fixed = self.image_size
        side = 320 if self.task == 'mmdet' else 256  # the coarsest map of a detector has stride 128
        return [fixed] if fixed and max(fixed) <= 320 else [(side, side), *([fixed] if fixed else [])]

    def network(self, model: dict) -> dict:
        """The part of a model that holds the backbone, as :func:`apart` gives it."""
        return apart(model[self.inner] if self.inner else model)


def apart(network: dict) -> dict:
    """A network with ``backbone`` and ``neck`` in place of a list in ``image_encoder`` (MMPretrain's retrievers)."""
    if not isinstance(network.get('image_encoder'), (list, tuple)):
        return network
    backbone, *neck = network['image_encoder']
    return {
        **{key: value for key, value in network.items() if key != 'image_encoder'},
        'backbone': backbone,
        'neck': neck,
    }


def together(network: dict) -> dict:
    """A network for its class to be built: the inverse of :func:`apart`."""
    if bare_name(network.get('type')) != 'ImageToImageRetriever':
        return network
    rest = {key: value for key, value in network.items() if key not in ('backbone', 'neck')}
    return {**rest, 'image_encoder': [network['backbone'], *network['neck']]}


def find_dict(node: Any, wanted: dict) -> Optional[dict]:
    """The first dict inside that has these values, a type in any scope."""
    if isinstance(node, dict):
        values = {**node, 'type': bare_name(node.get('type'))}
        if all(key in node and values[key] == value for key, value in wanted.items()):
            return node
        node = list(node.values())
    if isinstance(node, (list, tuple)):
        return next(filter(None, (find_dict(item, wanted) for item in node)), None)
    return None


def read_upstream(spec: str) -> Upstream:
    """Read the upstream config ``mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py``, or one by its path.

    Raises:
        RunError: It is not there, not readable, or of another project.
        NoModel: It is a part of others.
        NoPlace: Its model has no backbone that gives maps.
    """
    base, file = _find_config(spec)
    cfg, is_whole = read_config(str(file)), Config._is_lazy_import(str(file))
    task = cfg.get('default_scope') or (spec.partition('::')[0] if '::' in spec else None)
    if task not in PIP_NAMES:
        raise RunError(f'{spec} has default_scope {task!r}; allowed are: {", ".join(PIP_NAMES)}')
    if is_whole:
        cfg = Config(_named(cfg.to_dict(), task))
    model = cfg.get('model')
    if not isinstance(model, dict):
        raise NoModel(f'{spec} has no model: it is a part that other configs inherit')
    for inner in ('', 'detector'):
        network: Any = model.get(inner) if inner else model
        backbone = apart(network).get('backbone') if isinstance(network, dict) else None
        if isinstance(backbone, dict) and backbone.get('type'):  # Detectron2's and Hugging Face's have none
            kind = bare_name(backbone['type'])
            if kind in _OWN_HEADS:
                raise NoPlace(f'{spec} has no place for a pyramid: {_OWN_HEADS[kind]}')
            init_default_scope(task)
            return Upstream(base, cfg, task, inner, is_whole)
    raise NoPlace(f'{spec} has no place for a pyramid: {model.get("type")} has no backbone of its own to build')


def _find_config(spec: str) -> tuple[str, Path]:
    """The name by which a config inherits it, and the file."""
    if '::' not in spec:
        path = Path(spec).expanduser()
        if not path.is_file():
            raise RunError(f'UPSTREAM is {spec!r}: no such file (of an installed project: mmdet::FOLDER/CONFIG.py)')
        return str(path.resolve()), path
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
    return spec if re.match(r'\w+::\w+/', spec) else f'{scope}::_base_/../{name}', root / name


def _named(node: Any, task: str) -> Any:
    """A config with registered names for classes that it names by where they are."""
    if isinstance(node, (list, tuple)):
        return type(node)(_named(item, task) for item in node)
    if not isinstance(node, dict):
        return node
    out = {key: _named(value, task) for key, value in node.items()}
    kind = get_object_from_string(out['type']) if isinstance(out.get('type'), str) and '.' in out['type'] else None
    name = getattr(kind, '__name__', '')
    for root in (each for each in vars(mmengine.registry).values() if isinstance(each, Registry)):
        with root.switch_scope_and_registry(task) as registry:
            if name and registry.get(name) is kind:
                return {**out, 'type': name}
    return out
