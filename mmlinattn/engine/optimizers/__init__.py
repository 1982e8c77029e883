# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Constructors of optimizers."""

from .layer_decay import BackboneLayerDecayOptimWrapperConstructor
from .merged_groups import MergedOptimWrapperConstructor

__all__ = ['BackboneLayerDecayOptimWrapperConstructor', 'MergedOptimWrapperConstructor']
