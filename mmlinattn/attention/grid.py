# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tokens that live on a grid, and depth-wise convolutions of them."""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.autocast import autocasts
from ..layers.tracing import is_traced


class Grid(NamedTuple):
    """Where a sequence of tokens lives: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width of the window that this grid is the top left of, where the map ended.
    """

    height: int
    width: int
    prefix: int = 0
    within: Optional[tuple[int, int]] = None

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.height * self.width


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """Patch tokens (B, prefix + h * w, C) as an (B, C, h, w) view in channels-last memory."""
    return x[:, grid.prefix :].unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h * w, C); a view when the memory is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def add_local(out: Tensor, v: Tensor, conv, grid: Grid) -> Tensor:
    """Add ``conv`` of the value map to the patch tokens of ``out``; class tokens have no neighbours."""
    local = to_tokens(conv(to_map(v, grid)))
    if grid.prefix:
        local = F.pad(local, (0, 0, grid.prefix, 0))
    return out + local if torch.is_grad_enabled() or out.dtype != local.dtype else local.add_(out)


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Depth-wise convolution of stride 1 that keeps the size of the map.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor, optional): (C,).

    Returns:
        Tensor: (B, C, h, w).
    """
    padding, groups = weight.shape[-1] // 2, len(weight)
    learns = torch.is_grad_enabled() and weight.requires_grad
    plain = x.device.type != 'cpu' or weight.shape[-1] <= 3 or is_traced() or autocasts(x)
    if plain or not learns or x.dtype != weight.dtype:
        return F.conv2d(x, weight, bias, 1, padding, 1, groups)
    return _LargeDepthwise.apply(x, weight, bias)


class _LargeDepthwise(torch.autograd.Function):
    """Depth-wise convolution on CPUs whose weight gradient is put together from those of 3x3 convolutions.

    oneDNN has fast weight gradients for 3x3 only; for 5x5 it takes twenty times as long as for the forward pass.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, 1, weight.shape[-1] // 2, 1, len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
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


class DepthwiseConv2d(nn.Conv2d):
    """:func:`depthwise_conv2d` with its weights.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        return depthwise_conv2d(x, self.weight, self.bias)
