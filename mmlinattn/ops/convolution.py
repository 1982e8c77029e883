# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolution of a GELU, and depth-wise convolution with kernels predicted for each image."""

from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch
from .gradients import AnalyticGradient

Spans = Union[int, str, tuple[int, ...]]


def conv_of_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    stride: Spans = 1,
    padding: Spans = 0,
    dilation: Spans = 1,
    groups: int = 1,
    residual: bool = False,
) -> Tensor:
    """Convolution of ``gelu(x)``, plus ``gelu(x)`` if ``residual``. Only ``x`` is kept for the backward pass.

    The backward pass recomputes GELU, which is cheap. In stems and hidden layers its results are among the largest
    tensors that autograd would keep.

    Args:
        x (Tensor): (B, C, H, W), in any memory format.
        weight (Tensor): (C', C / groups, k, k).
        bias (Tensor, optional): (C',).
        stride, padding, dilation, groups: As in ``F.conv2d``.
        residual (bool): Add ``gelu(x)``; needs C' = C and a map of the same size.

    Returns:
        Tensor: (B, C', H', W'), as of ``F.conv2d``.
    """
    settings = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, residual=residual)
    is_plain = not torch.is_grad_enabled() or x.numel() == 0 or isinstance(padding, str)
    is_plain = is_plain or (not dispatch.state.settled and dispatch.needs_reference(x, weight, bias))
    # under autocast, F.conv2d casts float32 maps
    if is_plain or (x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)):
        return conv_of_gelu_reference(x, weight, bias, **settings)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return _ConvOfGELU.apply(settings, x, weight, bias)


def conv_of_gelu_reference(x, weight, bias, stride, padding, dilation, groups, residual) -> Tensor:
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, padding, dilation, groups)
    return hidden + out if residual else out


def _conv_of_gelu_backward(grads, inputs, kept, wanted, stride, padding, dilation, groups, residual):
    (grad,), (x, weight, _) = grads, inputs
    spans = ([span] * 2 if isinstance(span, int) else list(span) for span in (stride, padding, dilation))
    steps = *spans, False, [0, 0], groups
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, F.gelu(x), weight, [len(weight)], *steps, wanted
    )
    if grad_x is not None:
        grad_x = torch.ops.aten.gelu_backward(grad_x + grad if residual else grad_x, x)
    return grad_x, grad_weight, grad_bias


class _ConvOfGELU(AnalyticGradient):
    equation, gradient = staticmethod(conv_of_gelu_reference), staticmethod(_conv_of_gelu_backward)

    @staticmethod
    def forward(ctx: Any, options, x, weight, bias):
        ctx.op, ctx.options = _ConvOfGELU, options
        ctx.save_for_backward(x, weight, bias)
        return conv_of_gelu_reference(x, weight, bias, **options)


# --- depth-wise convolution with kernels for each image ---------------------------------------------------------------


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    """Dynamic depth-wise convolution: each image has its own kernels (InLine Eq. 6).

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        kernels (Tensor): (B, C, k, k), k odd.

    Returns:
        Tensor: (B, C, h, w).
    """
    if has_torch_function((x, kernels)):  # FLOP counters count the op as a whole
        return handle_torch_function(dynamic_depthwise_conv2d, (x, kernels), x, kernels)
    if dispatch.backend(x, kernels) == 'reference':
        return sum_of_shifts(x, kernels)
    # one grouped convolution: the channels of all images become channels of a single one, in channels-last memory
    (batch, dim, height, width), size = x.shape, kernels.shape[-1]
    if x.numel() == 0:  # PyTorch refuses a convolution without groups
        return x
    image = x.permute(2, 3, 0, 1).reshape(1, height, width, batch * dim).permute(0, 3, 1, 2)
    out = F.conv2d(image, kernels.reshape(-1, 1, size, size), padding=size // 2, groups=batch * dim)
    return out.reshape(batch, dim, height, width)


def sum_of_shifts(x: Tensor, kernels: Tensor) -> Tensor:
    # one shifted map for each kernel tap: a grouped convolution over all images would fix the batch size in a graph
    size, (height, width) = kernels.shape[-1], x.shape[-2:]
    padded = F.pad(x, [size // 2] * 4)
    out: Any = 0
    for i in range(size):
        for j in range(size):
            out = out + padded[..., i : i + height, j : j + width] * kernels[:, :, i, j, None, None]
    return out
