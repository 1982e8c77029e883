# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Necks that connect the backbones to heads of MMDetection, MMSegmentation and MMPretrain."""

from .adapter import MapAdapter
from .feature_pyramid import SimpleFeaturePyramid
from .projection import ConvProjectionNeck

__all__ = ['ConvProjectionNeck', 'MapAdapter', 'SimpleFeaturePyramid']
