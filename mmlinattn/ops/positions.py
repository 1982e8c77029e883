# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Position tables resized to other grids, and relative positions within windows."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype
from .tokens import Grid, Size, arange, as_tensor, is_known, unflatten


def table_on(table: Tensor, stored: tuple[int, int], grid: Grid, prefix: int = 0) -> Tensor:
    """Resize a table of learned position vectors bilinearly to another grid.

    Args:
        table (Tensor): (1, prefix + height * width, C) of the stored grid.
        stored (tuple[int, int]): Height and width of the stored grid; at this size the table is returned unchanged.
        grid (Grid): The requested grid.
        prefix (int): Class tokens of the table; their vectors are never resized.

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
    """Resize a position table bilinearly, ``align_corners=False``: (1, prefix + stored, C) -> (1, prefix + size, C).
    The vectors of class tokens stay."""
    if tuple(size) == stored:
        return table
    image = unflatten(table[:, prefix:], 1, stored).permute(0, 3, 1, 2)
    # in float32: neither CPU nor CUDA interpolates every half type
    wide = accumulation_dtype(image)
    image = F.interpolate(image.to(wide), size=tuple(size), mode='bilinear', align_corners=False).to(table.dtype)
    return torch.cat((table[:, :prefix], image.flatten(2).transpose(1, 2)), dim=1)


def resize_table_in_graph(table: Tensor, stored: tuple[int, int], grid: Grid, prefix: int = 0) -> Tensor:
    """:func:`resize_table` for a grid of dynamic size, by interpolation matrices (the identity at the stored size)."""
    sizes = grid.within or grid[:2]
    rows, columns = (_bilinear_weights(*axis, table) for axis in zip(stored, grid[:2], sizes))
    image = unflatten(table[0, prefix:], 0, stored).to(rows.dtype)
    image = torch.einsum('hi,wj,ijc->hwc', rows, columns, image).flatten(0, 1).to(table.dtype)
    return torch.cat((table[:, :prefix], image[None]), dim=1)


def _bilinear_weights(length: int, count: Size, size: Size, like: Tensor) -> Tensor:
    """Return the matrix (count, length) that resizes ``length`` values to ``size``, as :func:`resize_table` along one
    axis. Positions from ``size`` to ``count`` (padding) get the last value."""
    wide = accumulation_dtype(like)
    centres = arange(count, like, wide) + 0.5
    source = (centres * (length / as_tensor(size, like, wide)) - 0.5).clamp(0, length - 1)
    return (1 - (source[:, None] - arange(length, like, wide)).abs()).clamp(min=0)


def relative_index(height: Size, width: Size, largest: tuple[int, int], like: Tensor) -> Tensor:
    """Return the row of a table of relative positions for each pair of tokens of a window.

    Args:
        height, width: Size of the window, at most ``largest``.
        largest (tuple[int, int]): Window (h, w) that the table was made for; it has ``(2 h - 1) (2 w - 1)`` rows.
        like (Tensor): A tensor on the device of the result.

    Returns:
        Tensor: (N, N) int64.
    """
    # not a buffer: a model built on the meta device loses buffers that no checkpoint holds
    if is_known(height, width) and height * width <= CACHED_TOKENS and not dispatch.needs_reference(like):
        return _cached_index(height, width, largest, like.device)
    return _index(height, width, largest, like)


CACHED_TOKENS = 1024  # 8 MiB of index


def _index(height: Size, width: Size, largest: tuple[int, int], like: Tensor) -> Tensor:
    rows, columns = arange(height, like), arange(width, like)
    row = rows[:, None] - rows + largest[0] - 1
    column = columns[:, None] - columns + largest[1] - 1
    index = row[:, None, :, None] * (2 * largest[1] - 1) + column[None, :, None, :]  # (h, w, h, w)
    return index.flatten(2).flatten(0, 1)


@functools.lru_cache(maxsize=32)
def _cached_index(height: int, width: int, largest: tuple[int, int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cached tensor may be made in inference and used in training
        return _index(height, width, largest, torch.empty(0, device=device))
