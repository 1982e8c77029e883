# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read images as the test pipeline of a config does, and derive sizes and channels from the config."""

import inspect
import math
from contextlib import suppress
from typing import Any, Optional

import cv2
import numpy as np
from mmcv.transforms import Compose
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.utils import to_2tuple

from ..utils.errors import RunError, described
from ..utils.registering import bare_name
from .class_names import dataset_configs, first_test_data


def image_channels(cfg: Config) -> int:
    """Return the number of image channels that the model of a config takes.

    It is ``in_channels`` of the backbone (also inside an adapter), else the default of its class. Else it is the number
    of means of the data preprocessor, or 3.
    """
    backbone = (cfg.get('model') or {}).get('backbone') or {}
    while isinstance(backbone.get('module'), dict):
        backbone = backbone['module']
    channels, kind = backbone.get('in_channels'), backbone.get('type')
    if channels is None and kind:
        with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
            kind = registry.get(kind) if isinstance(kind, str) else kind
        # the class itself, or a base class that gets its keywords
        signatures = (inspect.signature(each.__init__).parameters for each in getattr(kind, '__mro__', ()))
        channels = next((each['in_channels'].default for each in signatures if 'in_channels' in each), None)
    mean = preprocessor(cfg).get('mean')
    if isinstance(channels, int):
        return channels
    return len(mean) if isinstance(mean, (list, tuple)) and mean else 3


def preprocessor(cfg: Config) -> dict:
    """Return the config of the data preprocessor. MMPretrain configs have it beside the model."""
    return (cfg.get('model') or {}).get('data_preprocessor') or cfg.get('data_preprocessor') or {}


def test_pipeline(cfg: Config) -> list[dict]:
    """Return the transforms of the test data except those for annotations; [] without test data."""
    pipelines = (data.get('pipeline') for _, data in dataset_configs(cfg, 'test_dataloader'))
    steps: list = next((steps for steps in pipelines if steps), [])
    return [step for step in steps if not bare_name(step['type']).endswith('Annotations')]


def split_pipeline(cfg: Config) -> tuple[list[dict], list[dict]]:
    """Return the transforms of the test pipeline that load the image, and those after them."""
    steps = test_pipeline(cfg)
    loads = [i for i, step in enumerate(steps) if bare_name(step['type']).startswith('Load')]
    after = loads[-1] + 1 if loads else 0
    return steps[:after], steps[after:]


def is_8_bit(cfg: Config) -> bool:
    """Return True if the test pipeline gives pixels from 0 to 255 for every file."""
    loading, _ = split_pipeline(cfg)
    if not loading:
        return True
    is_plain = bare_name(loading[0]['type']) == 'LoadImageFromFile' and loading[0].get('imdecode_backend') != 'tifffile'
    return is_plain and loading[0].get('color_type', 'color') != 'unchanged'


def image_dtype(cfg: Config) -> Optional[np.dtype]:
    """Return the type of the pixels in the first file of the test data; None if it cannot be read."""
    with DATASETS.switch_scope_and_registry(cfg.get('default_scope')) as registry, suppress(Exception):
        dataset = registry.build(dict(first_test_data(cfg), pipeline=[]))  # data sets of any project
        image: Any = cv2.imread(str(dataset.get_data_info(0)['img_path']), cv2.IMREAD_UNCHANGED)
        return image.dtype
    return None


def read_picture(path: str, cfg: Optional[Config] = None) -> np.ndarray:
    """Read an image by the test pipeline of a config, or raise a RunError: (H, W, C), or (H, W) for one channel.
    Without config, it is uint8 BGR."""
    loading = split_pipeline(cfg)[0] if cfg is not None else []
    if not loading:
        image = cv2.imread(str(path))
        if image is None:
            raise RunError(f'image {str(path)!r} cannot be read as an image.')
        return image
    init_default_scope(cfg.get('default_scope') or 'mmengine')  # type: ignore[union-attr]
    try:
        return Compose([dict(step) for step in loading])(dict(img_path=str(path), img_id=0))['img']
    except Exception as error:  # a transform of any project
        why = '' if isinstance(error, AssertionError) else f' ({described(error)})'  # MMCV's says no more
        raise RunError(f'image {str(path)!r} cannot be read as an image{why}.') from error


def test_size(cfg: Config) -> Optional[tuple[int, int]]:
    """Return height and width after the test pipeline and the model's padding; None if they depend on the image."""
    size: Any = None
    for step in test_pipeline(cfg):
        kind = bare_name(step['type'])
        if step.get('crop_size') or (kind == 'Pad' and step.get('size')):
            size = step.get('crop_size') or step['size']
        elif step.get('scale') and kind.endswith('Resize'):
            size = None if step.get('keep_ratio') else step['scale']
    if size is None:
        return None
    width, height = to_2tuple(size)  # MMCV's order
    given = preprocessor(cfg)
    divisor = given.get('pad_size_divisor') or (given.get('test_cfg') or {}).get('size_divisor') or 1
    return -(-height // divisor) * divisor, -(-width // divisor) * divisor


def resizing(cfg: Config) -> dict:
    """Return the last ``resize`` of the test pipeline (``scale`` is width and height, or one side), and a later
    ``crop`` (height and width), for JSON. Missing steps are None."""
    found: dict = dict(resize=None, crop=None)
    for step in test_pipeline(cfg):
        kind = bare_name(step['type'])
        if step.get('crop_size'):
            found['crop'] = list(to_2tuple(step['crop_size']))[::-1]
        elif step.get('scale') and 'Resize' in kind:
            found['resize'] = {key: list(value) if isinstance(value, tuple) else value for key, value in step.items()}
            del found['resize']['type']
    return found


def usual_size(cfg: Config) -> tuple[int, int]:
    """Return a typical input size (height, width) in pixels for an exported graph.

    A fixed size of the test pipeline (:func:`test_size`) is returned unchanged. Else a segmentor has its crop size and
    a classifier (224, 224). A detector has the size of a resized 3:2 image, rounded up to multiples of 32.
    """
    exact, scope = test_size(cfg), cfg.get('default_scope')
    if exact or scope == 'mmpretrain':
        return exact or (224, 224)
    if scope == 'mmseg':
        return tuple(to_2tuple(cfg.get('crop_size') or 512))
    scales = [step['scale'] for step in test_pipeline(cfg) if isinstance(step.get('scale'), (list, tuple))]
    short, long = (min(scales[-1]), max(scales[-1])) if scales else (800, 1333)
    height, width = (math.ceil(side / 32) * 32 for side in (short, min(long, short * 3 / 2)))
    return height, width
