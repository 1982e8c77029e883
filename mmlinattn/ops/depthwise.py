# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions of stride 1, which keep the size of the map."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .convolution import conv_of_gelu
from .tensors import first_order


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, onto: Optional[Tensor] = None) -> Tensor:
    """Depth-wise convolution, added to another map where one is given.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor, optional): (C,).
        onto (Tensor, optional): (B, C, h, w), added. In inference it is scratch memory of this function, which may hold
            the result.

    Returns:
        Tensor: (B, C, h, w).
    """
    backend = dispatch.backend(x, weight, bias, onto)
    if backend == 'triton':
        from .triton import depthwise

        return _summed(depthwise.depthwise_conv2d(x, weight, bias), onto)
    if backend == 'cpu':
        if not dispatch.records() and onto is not None and _can_add(x, onto):
            return _convolved_onto(x, weight, bias, onto)
        plain = not dispatch.autocasts(x) and x.dtype == weight.dtype and x.numel() > 0
        if dispatch.records() and weight.requires_grad and weight.shape[-1] > 3 and plain:
            return _summed(_LargeDepthwise.apply(x, weight, bias), onto)
    return _summed(depthwise_conv2d_reference(x, weight, bias), onto)


def depthwise_conv2d_reference(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return F.conv2d(x, weight, bias, 1, weight.shape[-1] // 2, 1, len(weight))


def _summed(out: Tensor, onto: Optional[Tensor]) -> Tensor:
    if onto is None:
        return out
    in_place = not dispatch.records() and onto.dtype == out.dtype and not dispatch.is_plain(onto)
    return onto.add_(out) if in_place else onto + out


def _can_add(x: Tensor, onto: Tensor) -> bool:
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return (
        channels_last
        and onto.is_contiguous(memory_format=torch.channels_last)
        and onto.dtype == dispatch.compute_dtype(x)
    )


def _convolved_onto(x: Tensor, weight: Tensor, bias: Optional[Tensor], onto: Tensor) -> Tensor:
    x, weight = x.to(onto.dtype), weight.to(onto.dtype)
    bias = None if bias is None else bias.to(onto.dtype)
    if not private.onednn_takes(x, weight):
        return _summed(depthwise_conv2d_reference(x, weight, bias), onto)
    steps = ([weight.shape[-1] // 2] * 2, [1, 1], [1, 1], len(weight))
    return private.CONV_ONTO.binary(onto, x, weight, bias, *steps, 'add', 1.0, None, [], None)


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor], of_gelu: bool = False) -> Tensor:
    """``y + DWConv(y)`` of ``y = x``, or of ``y = gelu(x)``.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor, optional): (C,).
        of_gelu (bool): Apply GELU first; it is computed again in the backward pass, which then needs ``x`` only.

    Returns:
        Tensor: (B, C, h, w).
    """
    backend = dispatch.backend(x, weight, bias)
    if backend == 'reference':
        x = F.gelu(x) if of_gelu else x
        return x + depthwise_conv2d_reference(x, weight, bias)
    if backend == 'triton':
        from .triton import depthwise

        return depthwise.residual_depthwise_conv2d(x, weight, bias, of_gelu)
    return residual_depthwise_conv2d_eager(x, weight, bias, of_gelu)


def residual_depthwise_conv2d_eager(x: Tensor, weight: Tensor, bias: Optional[Tensor], of_gelu: bool) -> Tensor:
    residual = True
    if x.dtype in (torch.float32, torch.float64) and not dispatch.autocasts(x):
        # The identity is a tap of the kernel: one pass over the map less. In half precision the tap would round the
        # residual stream, so there the sum stays outside.
        weight, residual = weight + F.pad(weight.new_ones(1, 1, 1, 1), [weight.shape[-1] // 2] * 4), False
    if of_gelu:
        return conv_of_gelu(x, weight, bias, 1, len(weight), residual)
    out = depthwise_conv2d(x, weight, bias)
    return x + out if residual else out


class _LargeDepthwise(torch.autograd.Function):
    """Depth-wise convolution on CPUs whose weight gradient is put together from those of 3x3 convolutions.

    oneDNN has fast weight gradients for 3x3 only; for 5x5 it takes twenty times as long as for the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return depthwise_conv2d_reference(x, weight, bias)

    @first_order
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
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


# --- kernels of each image's own --------------------------------------------------------------------------------------


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor, onto: Optional[Tensor] = None) -> Tensor:
    """Dynamic depth-wise convolution: each image has kernels of its own (InLine Eq. 6).

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        kernels (Tensor): (B, C, k, k), k odd.
        onto (Tensor, optional): As in :func:`depthwise_conv2d`.

    Returns:
        Tensor: (B, C, h, w).
    """
    backend = dispatch.backend(x, kernels, onto)
    if backend == 'reference':
        return _summed(sum_of_shifts(x, kernels), onto)
    if backend == 'triton':
        from .triton import depthwise

        return _summed(depthwise.dynamic_depthwise_conv2d(x, kernels), onto)
    if x.shape[0] == 1:
        return depthwise_conv2d(x, kernels.transpose(0, 1), None, onto)
    return _summed(dynamic_depthwise_conv2d_eager(x, kernels), onto)


def sum_of_shifts(x: Tensor, kernels: Tensor) -> Tensor:
    # one shifted map a tap: a grouped convolution of all images as channels would fix their number in a recorded graph
    size, (height, width) = kernels.shape[-1], x.shape[-2:]
    padded = F.pad(x, [size // 2] * 4)
    out: Any = 0
    for i in range(size):
        for j in range(size):
            out = out + padded[..., i : i + height, j : j + width] * kernels[:, :, i, j, None, None]
    return out


def dynamic_depthwise_conv2d_eager(x: Tensor, kernels: Tensor) -> Tensor:
    """All images as channels of one, in channels-last memory."""
    (batch, dim, height, width), size = x.shape, kernels.shape[-1]
    if x.numel() == 0:  # no groups, which PyTorch refuses
        return x
    image = x.permute(2, 3, 0, 1).reshape(1, height, width, batch * dim).permute(0, 3, 1, 2)
    out = F.conv2d(image, kernels.reshape(-1, 1, size, size), padding=size // 2, groups=batch * dim)
    return out.reshape(batch, dim, height, width)
