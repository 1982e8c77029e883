# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the tests of configs share: each loaded once, models without random weights."""

import contextlib
import copy
import functools
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from torch import nn

ROOT = Path(__file__).parents[1]
CONFIG_DIR = ROOT / 'configs'
# No rows of a paper: the small models for the shapes data sets
UNPUBLISHED = {f'{task}/ravlt_shapes_quickstart' for task in ('mmdet', 'mmseg', 'mmpretrain')}
CONFIGS = sorted(
    name for path in CONFIG_DIR.glob('mm*/*.py') if (name := f'{path.parent.name}/{path.stem}') not in UNPUBLISHED
)

_INITIALISERS = 'kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ uniform_ normal_'.split()


def configs_of(prefix: str) -> list[str]:
    """Names (``task/stem``) that begin so."""
    return [name for name in CONFIGS if name.startswith(prefix)]


@functools.cache
def load(name: str) -> Config:
    """A config by its name; not to be changed."""
    return Config.fromfile(CONFIG_DIR / f'{name}.py')


def build(name: str, random_init: bool = True, **options) -> tuple[nn.Module, Config]:
    """The model of a config and the config, made to train from scratch as a user would.

    Args:
        name: ``task/stem``.
        random_init: False leaves memory as it is, which builds 100 M parameters in no time.
        options: as after ``--cfg-options``, with ``__`` for dots.
    """
    cfg = copy.deepcopy(load(name))  # building cascades changes lists of their training settings
    cfg.merge_from_dict({'model.backbone.init_cfg': None})
    cfg.merge_from_dict({key.replace('__', '.'): value for key, value in options.items()})
    init_default_scope(cfg.default_scope)
    # as the Runner does; MMPretrain keeps it outside the model
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    with contextlib.ExitStack() as stack:
        for initialiser in () if random_init else _INITIALISERS:
            keep = mock.patch.object(torch.nn.init, initialiser, lambda tensor, *_, **__: tensor)
            stack.enter_context(keep)
        return MODELS.build(cfg.model), cfg


def training_batch(task: str) -> dict:
    """Two 64x64 images with what the task's data sets give."""
    pictures = [torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8) for _ in range(2)]
    samples = []
    for label in range(2):
        if task == 'mmdet':
            from mmdet.structures import DetDataSample
            from mmdet.structures.mask import BitmapMasks

            sample = DetDataSample(metainfo=dict(img_shape=(64, 64), pad_shape=(64, 64)))
            masks = np.zeros((1, 64, 64), np.uint8)
            masks[0, 8:50, 8:50] = 1
            sample.gt_instances = InstanceData(
                bboxes=torch.tensor([[8.0, 8, 50, 50]]),
                labels=torch.tensor([label]),
                masks=BitmapMasks(masks, 64, 64),
            )
        elif task == 'mmseg':
            from mmseg.structures import SegDataSample

            sample = SegDataSample(metainfo=dict(img_shape=(64, 64)))
            sample.gt_sem_seg = PixelData(data=torch.full((1, 64, 64), label))
        else:
            from mmpretrain.structures import DataSample

            sample = DataSample().set_gt_label(label)
        samples.append(sample)
    return dict(inputs=pictures, data_samples=samples)
