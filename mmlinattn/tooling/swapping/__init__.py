# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replace the backbone in configs of MMDetection, MMSegmentation and MMPretrain."""

from .swap import Swapped, swap_backbone
from .upstream import NoModel, Unsupported
from .zoo import backbone_names

__all__ = ['NoModel', 'Unsupported', 'Swapped', 'backbone_names', 'swap_backbone']
