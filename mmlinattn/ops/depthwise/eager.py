# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F
from torch import Tensor

from ..conv_of_gelu import conv_of_gelu
from ..forms import autocasts
from .reference import depthwise_conv2d

__all__ = ['depthwise_conv2d', 'residual_depthwise_conv2d']


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, of_gelu: bool = False, conv=depthwise_conv2d):
    """As the reference; ``conv`` is the convolution used where there is no GELU."""
    residual = True
    if x.dtype in (torch.float32, torch.float64) and not autocasts(x):
        # The identity is a tap of the kernel: one pass over the map less. In half precision the tap would round the
        # residual stream, so there the sum stays outside.
        weight, residual = weight + F.pad(weight.new_ones(1, 1, 1, 1), [weight.shape[-1] // 2] * 4), False
    if of_gelu:
        return conv_of_gelu(x, weight, bias, 1, len(weight), residual)
    out = conv(x, weight, bias)
    return x + out if residual else out
