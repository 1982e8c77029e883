# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Synthetic data sets in the layouts of COCO, ADE20K and ImageNet.

``import mmlinattn`` does not import this package: it needs OpenCV, the models do not.
"""

from .shapes import ADE20K_NAMES, ADE_CLASSES, CLASSES, COCO_CLASSES, IMAGENET_CLASSES, SHAPES, Scene, draw_scene
from .writer import DatasetSpec, SettingError, write_dataset

__all__ = ['ADE20K_NAMES', 'ADE_CLASSES', 'CLASSES', 'COCO_CLASSES', 'IMAGENET_CLASSES', 'SHAPES']
__all__ += ['DatasetSpec', 'Scene', 'SettingError', 'draw_scene', 'write_dataset']
