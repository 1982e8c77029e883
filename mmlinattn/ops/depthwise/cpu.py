# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import autocasts, records
from ..memory import differentiable
from . import eager, reference


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    learns = records() and weight.requires_grad
    if not learns or weight.shape[-1] <= 3 or autocasts(x) or x.dtype != weight.dtype or x.numel() == 0:
        return reference.depthwise_conv2d(x, weight, bias)
    return _LargeDepthwise.apply(x, weight, bias)


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, of_gelu: bool = False) -> Tensor:
    return eager.residual_depthwise_conv2d(x, weight, bias, of_gelu, conv=depthwise_conv2d)


class _LargeDepthwise(torch.autograd.Function):
    """Depth-wise convolution on CPUs whose weight gradient is put together from those of 3x3 convolutions.

    oneDNN has fast weight gradients for 3x3 only; for 5x5 it takes twenty times as long as for the forward pass.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        ctx.plain = 3, reference.depthwise_conv2d
        return reference.depthwise_conv2d(x, weight, bias)

    @differentiable
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        size, (height, width) = weight.shape[-1], x.shape[-2:]
        padding = size // 2

        def gradients(source, kernel, padding, wanted):
            return torch.ops.aten.convolution_backward(
                grad, source, kernel, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], len(kernel), wanted
            )

        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = gradients(x, weight, padding, [True, False, False])[0]
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            part = weight[..., :3, :3].contiguous()
            padded = F.pad(x, [padding] * 4).contiguous(memory_format=torch.channels_last)
            starts = [*range(0, size - 3, 3), size - 3]
            for top in starts:
                for left in starts:
                    shifted = padded[..., top : top + height + 2, left : left + width + 2]
                    taps = gradients(shifted, part, 0, [False, True, False])[1]
                    grad_weight[..., top : top + 3, left : left + 3] = taps
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(dim=(0, 2, 3))
        return grad_x, grad_weight, grad_bias
