# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Necks between a backbone and an upstream head."""

from .adapter import MapAdapter
from .feature_pyramid import SimpleFeaturePyramid
from .projection import ConvProjectionNeck

__all__ = ['ConvProjectionNeck', 'MapAdapter', 'SimpleFeaturePyramid']
