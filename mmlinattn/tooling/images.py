# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Images as a config's own test pipeline reads and sizes them, and how many channels its model takes."""

import inspect
import math
from typing import Any, Optional

import cv2
import numpy as np
from mmcv.transforms import Compose
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from ..utils.errors import RunError, described
from ..utils.registering import bare_name
from .class_names import dataset_configs


def image_channels(cfg: Config) -> int:
    """Channels of the images that a config's model takes: ``in_channels`` of its backbone, also inside an adapter, or
    of the backbone's class, else as many as the data preprocessor has means, 3 where nobody says."""
    model = cfg.get('model') or {}
    backbone = model.get('backbone') or {}
    while isinstance(backbone.get('module'), dict):
        backbone = backbone['module']
    given, kind = backbone.get('in_channels'), backbone.get('type')
    if given is None and kind:
        with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
            kind = registry.get(kind) if isinstance(kind, str) else kind
        # of the class itself, or of one that it hands its keywords on to
        signatures = (inspect.signature(each.__init__).parameters for each in getattr(kind, '__mro__', ()))
        given = next((found['in_channels'].default for found in signatures if 'in_channels' in found), None)
    mean = preprocessor(cfg).get('mean')
    return given if isinstance(given, int) else len(mean) if isinstance(mean, (list, tuple)) and mean else 3


def preprocessor(cfg: Config) -> dict:
    """The data preprocessor's settings; MMPretrain has them beside the model."""
    return cfg.get('model', {}).get('data_preprocessor') or cfg.get('data_preprocessor') or {}


def test_pipeline(cfg: Config) -> list[dict]:
    """The transforms of a config's test data that do without annotations; none where it has no test data."""
    pipelines = (data.get('pipeline') for _, data in dataset_configs(cfg, 'test_dataloader'))
    steps: list = next(filter(None, pipelines), [])
    return [step for step in steps if not bare_name(step['type']).endswith('Annotations')]


def _split(cfg: Config) -> tuple[list[dict], list[dict]]:
    """A test pipeline up to the image in memory, and from there on."""
    steps = test_pipeline(cfg)
    loads = [i for i, step in enumerate(steps) if bare_name(step['type']).startswith('Load')]
    after = loads[-1] + 1 if loads else 0
    return steps[:after], steps[after:]


def is_8_bit(cfg: Config) -> bool:
    """Whether the test pipeline gives pixels from 0 to 255 for every file."""
    loading, _ = _split(cfg)
    if not loading:
        return True
    is_plain = bare_name(loading[0]['type']) == 'LoadImageFromFile' and loading[0].get('imdecode_backend') != 'tifffile'
    return is_plain and loading[0].get('color_type', 'color') != 'unchanged'


def transforms(cfg: Config) -> list[dict]:
    """The transforms of a config's test data from an image in memory on.

    Raises:
        RunError: The config has no test pipeline.
    """
    if not test_pipeline(cfg):
        raise RunError('the config has no test_dataloader.dataset.pipeline; give --shape H W.')
    return _split(cfg)[1]


def read_picture(path: str, cfg: Optional[Config] = None) -> np.ndarray:
    """(H, W, C) or, of one channel, (H, W), as the test pipeline of a config reads it; (H, W, 3) uint8 BGR without one.

    Raises:
        RunError: The file is no image, or none that the pipeline reads.
    """
    loading = _split(cfg)[0] if cfg is not None else []
    if not loading:
        image = cv2.imread(str(path))
        if image is None:
            raise RunError(f'image {str(path)!r} cannot be read as an image.')
        return image
    init_default_scope(cfg.get('default_scope') or 'mmengine')  # type: ignore[union-attr]
    try:
        return Compose([dict(step) for step in loading])(dict(img_path=str(path), img_id=0))['img']
    except Exception as error:  # of a transform of anybody's
        why = '' if isinstance(error, AssertionError) else f' ({described(error)})'  # MMCV's says no more
        raise RunError(f'image {str(path)!r} cannot be read as an image{why}.') from error


def test_size(cfg: Config) -> Optional[tuple[int, int]]:
    """Height and width that the test pipeline gives every image, padding by the model included; None where they depend
    on the image."""
    size: Any = None
    for step in test_pipeline(cfg):
        kind = bare_name(step['type'])
        if step.get('crop_size') or (kind == 'Pad' and step.get('size')):
            size = step.get('crop_size') or step['size']
        elif step.get('scale') and kind.endswith('Resize'):
            size = None if step.get('keep_ratio') else step['scale']
    if size is None:
        return None
    width, height = (size, size) if isinstance(size, int) else size  # as MMCV has them
    given = preprocessor(cfg)
    divisor = given.get('pad_size_divisor') or (given.get('test_cfg') or {}).get('size_divisor') or 1
    return -(-height // divisor) * divisor, -(-width // divisor) * divisor


def resizing(cfg: Config) -> dict:
    """How the test pipeline sizes an image, fit for JSON.

    Returns:
        dict: ``resize``, the arguments of the last step that resizes (``scale`` is width and height, or an edge), and
        ``crop``, height and width of a crop after it; None for steps that the pipeline lacks.
    """
    found: dict = dict(resize=None, crop=None)
    for step in test_pipeline(cfg):
        kind = bare_name(step['type'])
        if step.get('crop_size'):
            size = step['crop_size']
            found['crop'] = [size, size] if isinstance(size, int) else list(size)[::-1]
        elif step.get('scale') and 'Resize' in kind:
            found['resize'] = {key: list(value) if isinstance(value, tuple) else value for key, value in step.items()}
            del found['resize']['type']
    return found


def usual_size(cfg: Config) -> tuple[int, int]:
    """Height and width to make a graph for: :func:`test_size`, else the crop of a segmentor, else those of a photograph
    of 3:2 that is resized as the test pipeline does, in multiples of 32."""
    exact, scope = test_size(cfg), cfg.get('default_scope')
    if exact or scope == 'mmpretrain':
        return exact or (224, 224)
    if scope == 'mmseg':
        size = cfg.get('crop_size') or 512
        return (size, size) if isinstance(size, int) else tuple(size)
    scales = [step['scale'] for step in test_pipeline(cfg) if isinstance(step.get('scale'), (list, tuple))]
    short, long = (min(scales[-1]), max(scales[-1])) if scales else (800, 1333)
    height, width = (math.ceil(side / 32) * 32 for side in (short, min(long, short * 3 / 2)))
    return height, width
