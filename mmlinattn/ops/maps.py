# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Padding, patches and pooling of (B, H, W, C) feature maps that stay right in graphs of dynamic sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .tokens import clone_if_dynamic, is_known, round_up, to_image, unflatten


def pad_by(x: Tensor, beyond: int) -> Tensor:
    """Zero-pad (B, H, W, C) by ``beyond`` rows and columns at the bottom and right.

    With ``beyond`` = kernel size - 2 * padding - 1, a convolution gives ceil(H / stride) x ceil(W / stride). The
    padding is the same at every size, so graphs hold for other sizes. The convolution does not read surplus rows.
    """
    return F.pad(x, (0, 0, 0, beyond, 0, beyond)) if beyond else x


def pad_to_multiple(x: Tensor, step: int) -> Tensor:
    """Zero-pad (B, H, W, C) at the bottom and right to multiples of ``step``."""
    height, width = (round_up(side, step) - side for side in x.shape[1:3])
    if is_known(height, width) and not (height or width):  # padding by nothing would copy the feature map
        return x
    return F.pad(x, (0, 0, 0, width, 0, height))


def cut_patches(x: Tensor, size: int) -> Tensor:
    """Cut (B, H, W, C) into (B, H / size, W / size, size, size, C); H and W are multiples of ``size``."""
    return clone_if_dynamic(unflatten(unflatten(x, 2, (-1, size)), 1, (-1, size)).transpose(2, 3))


def mean_pool(x: Tensor, size: int, dim: int) -> Tensor:
    """Average patches of ``size`` x ``size`` pixels: (B, H, W, dim) -> (B, dim, ceil(H / size), ceil(W / size)). A
    partial patch at the border averages the pixels that it has."""
    image = to_image(x)
    if is_known(*x.shape[1:3]):
        return F.avg_pool2d(image, size, ceil_mode=True, count_include_pad=False)
    # a graph of dynamic size cannot test for a partial last patch
    beyond = [0, size - 1, 0, size - 1]
    shares = _conv_mean(F.pad(torch.ones_like(image[:1, :1]), beyond), (size, size), 1)
    return _conv_mean(F.pad(image, beyond), (size, size), dim) / shares


def sequence_mean(x: Tensor, length: int, dim: int) -> Tensor:
    """Average each ``length`` consecutive tokens of the flattened map and drop the remainder: (B, H, W, dim) -> (B,
    dim, 1, H W // length)."""
    sequence, size = to_image(x.flatten(1, 2)[:, None]), (1, length)
    return F.avg_pool2d(sequence, size) if is_known(*x.shape[1:3]) else _conv_mean(sequence, size, dim)


def _conv_mean(image: Tensor, size: tuple[int, int], dim: int) -> Tensor:
    """Compute ``F.avg_pool2d(image, size)`` of ``dim`` channels by a depth-wise convolution.

    A pool would make ``torch.export`` accept divisible sizes only.
    """
    weight = image.new_full((dim, 1, *size), 1 / (size[0] * size[1]))
    return F.conv2d(image, weight, stride=size, groups=dim)
