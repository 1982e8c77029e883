# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Another backbone in any config of MMDetection, MMSegmentation and MMPretrain."""

from .swap import Swapped, swap_backbone
from .upstream import NoModel, NoPlace
from .zoo import backbone_names

__all__ = ['NoModel', 'NoPlace', 'Swapped', 'backbone_names', 'swap_backbone']
