# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every computation that has more than one form (plain, CPU, GPU), one folder each; :mod:`.forms` says which runs."""

from .angular_attention import angular_attention
from .conv_norms import conv_norms
from .conv_of_gelu import conv_of_gelu
from .depthwise import depthwise_conv2d, residual_depthwise_conv2d
from .efficient_attention import efficient_attention
from .elementwise import add, multiply
from .feed_forward import feed_forward
from .focused_attention import focused_attention
from .forms import use
from .gelu_of_conv import gelu_of_conv
from .hallucinated_attention import hallucinated_attention
from .hidden_conv import hidden_conv
from .hydra_attention import hydra_attention
from .inline_attention import inline_attention
from .linear import apply_linear, linear, takes_scale
from .linear_attention import linear_attention
from .predicted_conv import predicted_conv2d
from .projection import project
from .rala import rala
from .rotary import rotate
from .softmax_attention import softmax_attention

__all__ = [
    'add',
    'angular_attention',
    'apply_linear',
    'conv_norms',
    'conv_of_gelu',
    'depthwise_conv2d',
    'efficient_attention',
    'feed_forward',
    'focused_attention',
    'gelu_of_conv',
    'hallucinated_attention',
    'hidden_conv',
    'hydra_attention',
    'inline_attention',
    'linear',
    'linear_attention',
    'multiply',
    'predicted_conv2d',
    'project',
    'rala',
    'residual_depthwise_conv2d',
    'rotate',
    'softmax_attention',
    'takes_scale',
    'use',
]
