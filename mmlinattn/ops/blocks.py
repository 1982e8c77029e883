# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Blocks of tokens that bound the memory of an op on CPUs."""

from collections.abc import Iterator

from torch import Tensor

from . import dispatch
from .dtypes import accumulation_dtype

# Elements of the intermediate results that an op makes at once on CPUs. Smaller blocks mean more parallel regions, and
# each waits for its last thread.
BLOCK_NUMEL = 2**21


def blocks(x: Tensor, batch: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Slices of images and of tokens that cut ``x`` into blocks of :data:`BLOCK_NUMEL`; one block on other devices than
    CPUs. A block holds several small images, or part of one."""
    width = x.numel() // max(batch * tokens, 1)
    whole = not dispatch.on_cpu(x)
    rows = tokens if whole else max(1, min(tokens, BLOCK_NUMEL // max(width, 1)))
    images = batch if whole else max(1, BLOCK_NUMEL // max(tokens * width, 1))
    for first in range(0, batch, max(images, 1)):
        for top in range(0, tokens, max(rows, 1)):
            yield slice(first, first + images), slice(top, top + rows)


def widen_blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the tokens of (..., B, heads, N, d) in half precision, and a float32 copy of each; the copy is written
    back after it was modified in place."""
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :]
        wide = part.to(accumulation_dtype(x))
        yield rows, wide
        part.copy_(wide)
