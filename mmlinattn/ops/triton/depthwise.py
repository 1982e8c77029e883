# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions by GPU kernels; PyTorch's own are slow in half precision on channels-last maps."""

from typing import Optional

from torch import Tensor

from .. import dispatch
from ..convolution import (
    depthwise_conv2d_reference,
    dynamic_depthwise_conv2d_eager,
    residual_depthwise_conv2d_eager,
    sum_of_shifts,
)
from .depthwise_op import convolve


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    out = convolve(x, weight, bias)
    return depthwise_conv2d_reference(x, weight, bias) if out is None else out


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor], of_gelu: bool = False) -> Tensor:
    out = convolve(x, weight, bias, True, of_gelu)
    if out is None:
        return residual_depthwise_conv2d_eager(x, weight, bias, of_gelu, dispatch.route(x, weight, bias))
    return out


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    if x.dim() != 4 or kernels.shape[:2] != x.shape[:2]:
        return sum_of_shifts(x, kernels)  # which broadcasts, or raises
    out = convolve(x, kernels, None, of_each=True)
    return dynamic_depthwise_conv2d_eager(x, kernels) if out is None else out
