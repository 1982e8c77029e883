# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolutions with a GELU before or after them."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .tensors import first_order


def conv_of_gelu(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int = 1, groups: int = 1, residual: bool = False
) -> Tensor:
    """Convolution of ``gelu(x)``, plus ``gelu(x)`` itself where ``residual``, that keeps only ``x`` for the backward
    pass.

    GELU is cheap to compute a second time, and its results on stems and hidden layers are among the largest tensors
    that autograd would keep.

    Args:
        x (Tensor): (B, C, H, W), in any memory format.
        weight (Tensor): (C', C / groups, k, k), k odd; the padding is ``k // 2``.
        bias (Tensor, optional): (C',).
        stride, groups (int): Of the convolution.
        residual (bool): Add ``gelu(x)``; needs C' = C and stride 1.

    Returns:
        Tensor: (B, C', ceil(H / stride), ceil(W / stride)).
    """
    # autocast would change the type of float32 maps on the way
    casts = x.dtype == torch.float32 and dispatch.autocasts(x)
    if not dispatch.records() or casts or x.numel() == 0 or dispatch.is_plain(x, weight, bias):
        return conv_of_gelu_reference(x, weight, bias, stride, groups, residual)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return _ConvOfGELU.apply(x, weight, bias, stride, groups, residual)


def conv_of_gelu_reference(x, weight, bias, stride, groups, residual) -> Tensor:
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
    return hidden + out if residual else out


class _ConvOfGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, stride, groups, residual):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.groups, ctx.residual = stride, groups, residual
        return conv_of_gelu_reference(x, weight, bias, stride, groups, residual)

    @first_order
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        padding = weight.shape[-1] // 2
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad,
            F.gelu(x),
            weight,
            [len(weight)],
            [ctx.stride] * 2,
            [padding] * 2,
            [1, 1],
            False,
            [0, 0],
            ctx.groups,
            ctx.needs_input_grad[:3],
        )
        if grad_x is not None:
            grad_x = torch.ops.aten.gelu_backward(grad_x + grad if ctx.residual else grad_x, x)
        return grad_x, grad_weight, grad_bias, None, None, None


def gelu_of_conv(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int = 1, padding: int = 0, groups: int = 1
) -> Tensor:
    """``gelu(conv(x))``, in one pass over the map in inference on CPUs.

    Args:
        x (Tensor): (B, C, H, W), best in channels-last memory.
        weight (Tensor): (C', C / groups, k, k).
        bias (Tensor, optional): (C',).
        stride, padding, groups (int): Of the convolution.

    Returns:
        Tensor: (B, C', H', W').
    """
    if not dispatch.records() and dispatch.backend(x, weight, bias) == 'cpu':
        dtype = dispatch.compute_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if private.onednn_takes(x, weight):
            steps = ([padding] * 2, [stride] * 2, [1, 1], groups)
            return private.CONV(x, weight, bias, *steps, 'gelu', [], 'none')
    return F.gelu(F.conv2d(x, weight, bias, stride, padding, 1, groups))
