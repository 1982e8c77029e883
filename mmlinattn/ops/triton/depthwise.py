# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions by GPU kernels; PyTorch's own are slow in half precision on channels-last maps."""

from typing import Optional

from torch import Tensor

from ..depthwise import (
    depthwise_conv2d_reference,
    dynamic_depthwise_conv2d_eager,
    residual_depthwise_conv2d_eager,
)
from .depthwise_op import convolve


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    out = convolve(x, weight.transpose(0, 1), bias)
    return depthwise_conv2d_reference(x, weight, bias) if out is None else out


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor], of_gelu: bool = False) -> Tensor:
    out = convolve(x, weight.transpose(0, 1), bias, True, of_gelu)
    return residual_depthwise_conv2d_eager(x, weight, bias, of_gelu) if out is None else out


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    out = convolve(x, kernels, None)
    return dynamic_depthwise_conv2d_eager(x, kernels) if out is None else out
