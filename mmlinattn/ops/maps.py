# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Padding, patches, pooling and position tables of (B, H, W, C) maps, right in graphs that leave H and W open."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import Grid
from .tensors import accumulation_dtype, as_tensor, clone_if_open, is_known, round_up, to_image, unflatten


def pad_by(x: Tensor, beyond: int) -> Tensor:
    """Zero-pad (B, H, W, C) at the bottom and right so that a convolution gives ceil(H / stride) x ceil(W / stride):
    ``beyond`` is its kernel size less twice its padding less 1.

    The padding is the same at every size, so graphs hold for other sizes: the convolution does not read surplus rows.
    """
    return F.pad(x, (0, 0, 0, beyond, 0, beyond)) if beyond else x


def pad_to_multiple(x: Tensor, step: int) -> Tensor:
    """Zero-pad (B, H, W, C) at the bottom and right to multiples of ``step``."""
    height, width = (round_up(side, step) - side for side in x.shape[1:3])
    if is_known(height, width) and not (height or width):  # padding by nothing would copy the map
        return x
    return F.pad(x, (0, 0, 0, width, 0, height))


def cut_patches(x: Tensor, size: int) -> Tensor:
    """(B, H, W, C) of whole patches -> (B, H / size, W / size, size, size, C)."""
    return clone_if_open(unflatten(unflatten(x, 2, (-1, size)), 1, (-1, size)).transpose(2, 3))


def mean_pool(x: Tensor, size: int, dim: int) -> Tensor:
    """Means of patches of ``size`` x ``size`` pixels, at odd borders of the pixels that are there: (B, H, W, dim) ->
    (B, dim, ceil(H / size), ceil(W / size))."""
    image = to_image(x)
    if is_known(*x.shape[1:3]):
        return F.avg_pool2d(image, size, ceil_mode=True, count_include_pad=False)
    # a graph of dynamic size cannot test for a partial last patch
    beyond = [0, size - 1, 0, size - 1]
    shares = _conv_mean(F.pad(torch.ones_like(image[:1, :1]), beyond), (size, size), 1)
    return _conv_mean(F.pad(image, beyond), (size, size), dim) / shares


def sequence_mean(x: Tensor, length: int, dim: int) -> Tensor:
    """Means of ``length`` consecutive tokens of the flattened map, without the remainder: (B, H, W,
    dim) -> (B, dim, 1, H W // length)."""
    sequence, size = to_image(x.flatten(1, 2)[:, None]), (1, length)
    return F.avg_pool2d(sequence, size) if is_known(*x.shape[1:3]) else _conv_mean(sequence, size, dim)


def _conv_mean(image: Tensor, size: tuple[int, int], dim: int) -> Tensor:
    """``F.avg_pool2d(image, size)`` by a convolution: for the pool, ``torch.export`` guards on divisible sizes."""
    weight = image.new_full((dim, 1, *size), 1 / (size[0] * size[1]))
    return F.conv2d(image, weight, stride=size, groups=dim)


# --- position tables --------------------------------------------------------------------------------------------------


def table_on(table: Tensor, stored: tuple[int, int], grid: Grid, prefix: int = 0) -> Tensor:
    """A learned vector for each token of a grid, resized bilinearly from those of another.

    Args:
        table (Tensor): (1, prefix + height * width, C) of the stored grid.
        stored (tuple[int, int]): Its height and width; at that size the table stays as it is.
        grid (Grid): The requested grid.
        prefix (int): Leading class tokens; their vectors are never resized.

    Returns:
        Tensor: (1, grid.num_tokens, C); zero for class tokens that the table has no vectors for.
    """
    if not is_known(*grid[:2], *(grid.within or ())):
        table = resize_table_in_graph(table, stored, grid, prefix)
    else:
        table = resize_table(table, stored, grid.within or grid[:2], prefix)
        if grid.within:
            table = unflatten(table, 1, grid.within)[:, : grid.height, : grid.width].flatten(1, 2)
    return F.pad(table, (0, 0, grid.prefix - prefix, 0)) if grid.prefix > prefix else table


def resize_table(table: Tensor, stored: tuple[int, int], size: tuple[int, int], prefix: int = 0) -> Tensor:
    """(1, prefix + stored, C) -> (1, prefix + size, C), bilinear with ``align_corners=False``; class tokens stay."""
    if tuple(size) == stored:
        return table
    image = unflatten(table[:, prefix:], 1, stored).permute(0, 3, 1, 2)
    # in float32: neither CPU nor CUDA interpolates every half type
    wide = accumulation_dtype(image)
    image = F.interpolate(image.to(wide), size=tuple(size), mode='bilinear', align_corners=False).to(table.dtype)
    return torch.cat((table[:, :prefix], image.flatten(2).transpose(1, 2)), dim=1)


def resize_table_in_graph(table: Tensor, stored: tuple[int, int], grid: Grid, prefix: int = 0) -> Tensor:
    """:func:`resize_table` for a grid of dynamic size: resized at every size, with no change at that of the table."""
    sizes = grid.within or grid[:2]
    rows, columns = (_bilinear_weights(*axis, table) for axis in zip(stored, grid[:2], sizes))
    image = unflatten(table[0, prefix:], 0, stored).to(rows.dtype)
    image = torch.einsum('hi,wj,ijc->hwc', rows, columns, image).flatten(0, 1).to(table.dtype)
    return torch.cat((table[:, :prefix], image[None]), dim=1)


def _bilinear_weights(length: int, count, size, like: Tensor) -> Tensor:
    """Matrix (count, length) that resizes ``length`` values to ``size``, as :func:`resize_table` does along an axis.

    Positions from ``size`` to ``count`` get the last value.
    """
    wide = accumulation_dtype(like)
    centres = torch.arange(count, dtype=wide, device=like.device) + 0.5
    source = (centres * (length / as_tensor(size, like, wide)) - 0.5).clamp(0, length - 1)
    return (1 - (source[:, None] - torch.arange(length, dtype=wide, device=like.device)).abs()).clamp(min=0)
