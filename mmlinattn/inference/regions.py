# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows without padding: a map is cut into up to four regions, each of equal windows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..ops.dtypes import accumulation_dtype
from ..ops.windows import Windows

# Rows and columns of a map, and the windows without a shift that they are cut into.
Region = tuple[slice, slice, Windows]
SMALL_NUMEL = 2**22  # elements of a map up to which padding is cheaper than one attention call for each region


def regions_of(x: Tensor, windows: Windows) -> list[Region]:
    """Return the unpadded regions of ``x`` (B, H, W, C): whole windows, and the partial ones at the right and bottom.
    Return an empty list if nothing is padded, or a small map by less than half of its area."""
    pads_little = 2 * math.prod(windows.padded) <= 3 * windows.height * windows.width
    if windows.padded == (windows.height, windows.width) or (pads_little and x.numel() <= SMALL_NUMEL):
        return []
    return [
        (slice(top, bottom), slice(left, right), Windows(bottom - top, right - left, (rows, columns)))
        for top, bottom, rows in _spans(windows.height, windows.window[0])
        for left, right, columns in _spans(windows.width, windows.window[1])
    ]


def _spans(size: int, window: int) -> list[tuple[int, int, int]]:
    """Return (first, last, window length) of an axis for its whole windows, and for the remainder if there is one."""
    whole = size - size % window
    return [(0, whole, window)] + [(whole, size, size - whole)] * (whole < size)


def cut(x: Tensor, regions: Sequence[Region], mean: bool = False) -> Iterator[Tensor]:
    """Yield the windows of each region of (B, H, W, C), (B * windows, h * w, C), or with ``mean`` their mean tokens, (B
    * windows, C)."""
    for rows, columns, part in regions:
        windows = _windows(x[:, rows, columns], part)
        yield (
            windows.mean(dim=(3, 4), dtype=accumulation_dtype(x)).to(x.dtype).flatten(0, 2)
            if mean
            else (windows.flatten(0, 2).flatten(1, 2))
        )


def assemble(pieces: Iterable[Tensor], regions: Sequence[Region]) -> Tensor:
    """Put the windows of all regions back into a map (B, H, W, C), the inverse of :func:`cut`. Each region is written
    before the next piece is requested, so ``pieces`` may be lazy."""
    out: Any = None
    for (rows, columns, part), tokens in zip(regions, pieces):
        if out is None:
            batch = tokens.shape[0] // math.prod(part.counts)
            last_rows, last_columns, _ = regions[-1]
            out = tokens.new_empty(batch, last_rows.stop, last_columns.stop, tokens.shape[-1])
        tokens = tokens.unflatten(1, part.window).unflatten(0, (-1, *part.counts))
        _windows(out[:, rows, columns], part).copy_(tokens)
    return out


def _windows(x: Tensor, windows: Windows) -> Tensor:
    """View (B, H, W, C) as (B, rows, columns, h, w, C)."""
    (rows, columns), (h, w) = windows.counts, windows.window
    return x.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3)
