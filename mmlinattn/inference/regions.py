# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows without padding: rows and columns of a map whose windows are of one size, each a group of its own."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.windows import Windows
from ..ops.tensors import accumulation_dtype

# Rows and columns of a map, and the windows without a shift that they are cut into.
Region = tuple[slice, slice, Windows]
SMALL_NUMEL = 2**22  # of a map whose windows pad


def regions_of(x: Tensor, windows: Windows) -> list[Region]:
    """The regions that ``x`` (B, H, W, C) is cut in: one that pads where that is little, else those that do not: the
    whole windows, and what is left of windows at the right and at the bottom."""
    pads_little = 2 * math.prod(windows.padded) <= 3 * windows.height * windows.width
    if pads_little and x.numel() <= SMALL_NUMEL:
        return [(slice(0, windows.height), slice(0, windows.width), windows)]
    return [
        (slice(top, bottom), slice(left, right), Windows(bottom - top, right - left, (rows, columns)))
        for top, bottom, rows in _spans(windows.height, windows.window[0])
        for left, right, columns in _spans(windows.width, windows.window[1])
    ]


def _spans(size: int, window: int) -> list[tuple[int, int, int]]:
    """First and last position and window of the whole windows of an axis, and of what is left."""
    whole = size - size % window
    return [(0, whole, window)] + [(whole, size, size - whole)] * (whole < size)


def cut(x: Tensor, regions: Sequence[Region], mean: bool = False) -> Iterator[Tensor]:
    """The windows of each region of (B, H, W, C): (B * windows, h * w, C), or their mean tokens, (B * windows, C)."""
    for rows, columns, part in regions:
        yield _means(part, x[:, rows, columns]) if mean else part.partition(x[:, rows, columns])


def assemble(pieces: Iterable[Tensor], regions: Sequence[Region]) -> Tensor:
    """(B, H, W, C) from the windows of its regions, the inverse of :func:`cut`. Those of a region are written to their
    places before the next are asked for."""
    out: Any = None
    for (rows, columns, part), windows in zip(regions, pieces):
        if out is None:
            batch = windows.shape[0] // (part.counts[0] * part.counts[1])
            last_rows, last_columns, _ = regions[-1]
            out = windows.new_empty(batch, last_rows.stop, last_columns.stop, windows.shape[-1])
        _put(part, windows, out[:, rows, columns])
    return out


def _put(windows: Windows, x: Tensor, out: Tensor) -> None:
    """Write windows (B * windows, h * w, C) without a shift to their places in (B, H, W, C)."""
    (rows, columns), (h, w) = windows.counts, windows.window
    if windows.padded != (windows.height, windows.width):
        out.copy_(windows.merge(x))
        return
    places = out.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3)
    places.copy_(x.unflatten(1, (h, w)).unflatten(0, (-1, rows, columns)))


def _means(windows: Windows, x: Tensor) -> Tensor:
    """Mean of the real tokens of each window of (B, H, W, C) without a shift, (B * windows, C)."""
    (rows, columns), (h, w) = windows.counts, windows.window
    height, width = windows.padded
    if (height, width) != (windows.height, windows.width):
        x = F.pad(x, (0, 0, 0, width - windows.width, 0, height - windows.height))
    total = x.unflatten(2, (columns, w)).unflatten(1, (rows, h)).sum(dim=(2, 4), dtype=accumulation_dtype(x))
    lengths = (
        (size - torch.arange(count, dtype=total.dtype) * length).clamp(max=length)
        for size, count, length in zip((windows.height, windows.width), windows.counts, windows.window)
    )
    return (total.flatten(1, 2) / torch.outer(*lengths).flatten()[:, None]).flatten(0, 1).to(x.dtype)
