# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocasts
from .tracing import is_traced


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
    # compilers decide by themselves what to compute again; autocast would change the type of float32 maps on the way
    casts = x.dtype == torch.float32 and autocasts(x)
    if casts or not torch.is_grad_enabled() or is_traced():
        hidden = F.gelu(x)
        out = F.conv2d(hidden, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
        return hidden + out if residual else out
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return _ConvOfGELU.apply(x, weight, bias, stride, groups, residual)


class _ConvOfGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, groups, residual):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.groups, ctx.residual = stride, groups, residual
        hidden = F.gelu(x)
        out = F.conv2d(hidden, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
        return out.add_(hidden) if residual else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
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
