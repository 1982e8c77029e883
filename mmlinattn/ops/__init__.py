# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Equations of attention and its parts, one file each.

A file of an attention has the public function, its equation in plain PyTorch, and for some a variant with an analytic
gradient. :mod:`.dispatch` chooses between them.
"""

from .angular import angular_attention
from .convolution import dynamic_depthwise_conv2d
from .dispatch import use
from .efficient import efficient_attention
from .focused import focused_attention
from .hallucinated import hallucinated_attention
from .hydra import hydra_attention
from .inline import inline_attention
from .leaves import (
    Chain,
    Conv2d,
    ConvOfGELU,
    LayerNorm,
    Linear,
    ResidualDWConv,
    add_scaled,
    chain,
    conv_of_gelu,
)
from .linear import linear_attention, rala
from .rotary import rotary_table, rotate
from .softmax import softmax_attention

__all__ = [
    'Chain',
    'Conv2d',
    'ConvOfGELU',
    'LayerNorm',
    'Linear',
    'ResidualDWConv',
    'add_scaled',
    'angular_attention',
    'chain',
    'conv_of_gelu',
    'dynamic_depthwise_conv2d',
    'efficient_attention',
    'focused_attention',
    'hallucinated_attention',
    'hydra_attention',
    'inline_attention',
    'linear_attention',
    'rala',
    'rotary_table',
    'rotate',
    'softmax_attention',
    'use',
]
