# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Constructors of optimizers."""

from .layer_decay import BackboneLayerDecayOptimWrapperConstructor

__all__ = ['BackboneLayerDecayOptimWrapperConstructor']
