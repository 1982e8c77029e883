# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolutions with a GELU before them, and depth-wise ones, which keep the size of the map."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .gradients import Rule, by_hand

# of a map whose 5x5 weight gradient costs at most 1.4 times what four 3x3 ones do, and 16 parallel regions less
_SMALL_NUMEL = 2**19


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
    if not torch.is_grad_enabled() or casts or x.numel() == 0 or dispatch.backend(x, weight, bias) == 'reference':
        return conv_of_gelu_reference(x, weight, bias, stride, groups, residual)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return by_hand(_CONV_OF_GELU, x, weight, bias, stride=stride, groups=groups, residual=residual)


def _padding(weight: Tensor) -> int:
    return int(weight.shape[-1] // 2)  # a tensor where PyTorch 2.4 traces


def conv_of_gelu_reference(x, weight, bias, stride, groups, residual) -> Tensor:
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, _padding(weight), 1, groups)
    return hidden + out if residual else out


def _conv_of_gelu(x, weight, bias, stride, groups, residual):
    return conv_of_gelu_reference(x, weight, bias, stride, groups, residual), ()


def _conv_of_gelu_backward(grads, inputs, kept, wanted, stride, groups, residual):
    (grad,), (x, weight, _) = grads, inputs
    padding = [weight.shape[-1] // 2] * 2
    steps = [stride] * 2, padding, [1, 1], False, [0, 0], groups
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, F.gelu(x), weight, [len(weight)], *steps, wanted
    )
    if grad_x is not None:
        grad_x = torch.ops.aten.gelu_backward(grad_x + grad if residual else grad_x, x)
    return grad_x, grad_weight, grad_bias


_CONV_OF_GELU = Rule(conv_of_gelu_reference, _conv_of_gelu, _conv_of_gelu_backward)


# --- depth-wise, of stride 1 ------------------------------------------------------------------------------------------


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Depth-wise convolution.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor, optional): (C,).

    Returns:
        Tensor: (B, C, h, w).
    """
    return _depthwise(x, weight, bias, dispatch.backend(x, weight, bias))


def _depthwise(x: Tensor, weight: Tensor, bias: Optional[Tensor], backend: str) -> Tensor:
    if backend == 'cpu' and torch.is_grad_enabled() and weight.requires_grad and weight.shape[-1] > 3:
        if x.dtype == weight.dtype and x.numel() > _SMALL_NUMEL and not dispatch.autocasts(x):
            return by_hand(_LARGE_DEPTHWISE, x, weight, bias)
    return depthwise_conv2d_reference(x, weight, bias)


def depthwise_conv2d_reference(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return F.conv2d(x, weight, bias, 1, _padding(weight), 1, len(weight))


def _large_depthwise(x, weight, bias):
    return depthwise_conv2d_reference(x, weight, bias), ()


def _large_depthwise_backward(grads, inputs, kept, wanted):
    """On CPUs; the weight gradient is put together from those of 3x3 convolutions. oneDNN has fast weight gradients for
    3x3 only; for 5x5 it takes twenty times as long as for the forward pass."""
    (grad,), (x, weight, _) = grads, inputs
    size, (height, width) = weight.shape[-1], x.shape[-2:]
    padding = size // 2

    def gradients(source, kernel, padding, wanted):
        steps = [1, 1], [padding] * 2, [1, 1], False, [0, 0], len(kernel)
        return torch.ops.aten.convolution_backward(grad, source, kernel, None, *steps, wanted)

    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        grad_x = gradients(x, weight, padding, [True, False, False])[0]
    if wanted[1]:
        grad_weight = torch.empty_like(weight)
        part = weight[..., :3, :3].contiguous()
        padded = F.pad(x, [padding] * 4).contiguous(memory_format=torch.channels_last)
        starts = [*range(0, size - 3, 3), size - 3]
        for top in starts:
            for left in starts:
                shifted = padded[..., top : top + height + 2, left : left + width + 2]
                taps = gradients(shifted, part, 0, [False, True, False])[1]
                grad_weight[..., top : top + 3, left : left + 3] = taps
    if wanted[2]:
        grad_bias = grad.sum(dim=(0, 2, 3))
    return grad_x, grad_weight, grad_bias


_LARGE_DEPTHWISE = Rule(depthwise_conv2d_reference, _large_depthwise, _large_depthwise_backward)


# --- kernels of each image's own --------------------------------------------------------------------------------------


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    """Dynamic depth-wise convolution: each image has kernels of its own (InLine Eq. 6).

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        kernels (Tensor): (B, C, k, k), k odd.

    Returns:
        Tensor: (B, C, h, w).
    """
    backend = dispatch.backend(x, kernels)
    if backend == 'reference':
        return sum_of_shifts(x, kernels)
    if x.shape[0] == 1:
        return _depthwise(x, kernels.transpose(0, 1), None, backend)
    return dynamic_depthwise_conv2d_eager(x, kernels)


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
