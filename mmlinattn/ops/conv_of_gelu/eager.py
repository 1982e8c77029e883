# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import autocasts, records
from ..memory import differentiable
from . import reference


def conv_of_gelu(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int = 1, groups: int = 1, residual: bool = False
) -> Tensor:
    # autocast would change the type of float32 maps on the way
    if not records() or (x.dtype == torch.float32 and autocasts(x)) or x.numel() == 0:
        return reference.conv_of_gelu(x, weight, bias, stride, groups, residual)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return _ConvOfGELU.apply(x, weight, bias, stride, groups, residual)


class _ConvOfGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, groups, residual):
        ctx.save_for_backward(x, weight, bias)
        ctx.stride, ctx.groups, ctx.residual = stride, groups, residual
        ctx.plain = 3, lambda *tensors: reference.conv_of_gelu(*tensors, stride, groups, residual)
        return reference.conv_of_gelu(x, weight, bias, stride, groups, residual)

    @differentiable
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
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
