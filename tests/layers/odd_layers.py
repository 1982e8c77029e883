# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolutions and modules whose weights alone do not say what they compute."""

from types import MethodType

from torch import nn


def doubled(module, bound=False):
    """With a ``forward`` of its own, as some put one on an instance: a function, or a method of the module."""
    original = module.forward
    module.forward = MethodType(lambda self, x: 2 * original(x), module) if bound else lambda x: 2 * original(x)
    return module


# what is no plain convolution: its weight alone does not say what it computes
OTHER_CONVS = {
    'same': lambda: nn.Conv2d(6, 6, 3, padding='same'),
    'reflect': lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect'),
    'weight norm': lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1)),
    'adapter': lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()),
    'forward': lambda: doubled(nn.Conv2d(6, 6, 3, padding=1)),
    'bound forward': lambda: doubled(nn.Conv2d(6, 6, 3, padding=1), bound=True),
}
