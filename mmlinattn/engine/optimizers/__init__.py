# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Constructors of optimizer wrappers: merged parameter groups, and layer-wise learning rate decay."""

from .layer_decay import BackboneLayerDecayOptimWrapperConstructor
from .merged_groups import MergedOptimWrapperConstructor

__all__ = ['BackboneLayerDecayOptimWrapperConstructor', 'MergedOptimWrapperConstructor']
