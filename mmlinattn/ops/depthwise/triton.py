# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels; PyTorch's own are slow in half precision on channels-last maps."""

from typing import Optional

from torch import Tensor

from . import eager
from .triton_op import convolve


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    out = convolve(x, weight.transpose(0, 1), bias)
    return eager.depthwise_conv2d(x, weight, bias) if out is None else out


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, of_gelu: bool = False) -> Tensor:
    out = convolve(x, weight.transpose(0, 1), bias, True, of_gelu)
    return eager.residual_depthwise_conv2d(x, weight, bias, of_gelu) if out is None else out
