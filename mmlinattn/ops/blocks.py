# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Blocks of tokens that bound the memory of an op on CPUs."""

from collections.abc import Iterator

from torch import Tensor

from . import dispatch
from .dtypes import accumulation_dtype

# Elements of a block on CPUs. Smaller blocks mean more parallel regions, and each waits for its last thread.
BLOCK_NUMEL = 2**21


def blocks(x: Tensor, batch: int, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of images and of tokens that cut ``x`` into blocks of about :data:`BLOCK_NUMEL` elements. A block
    holds several small images, or some tokens of one. Devices other than CPUs get a single block."""
    width = x.numel() // max(batch * tokens, 1)
    whole = not dispatch.on_cpu(x)
    rows = tokens if whole else max(1, min(tokens, BLOCK_NUMEL // max(width, 1)))
    images = batch if whole else max(1, BLOCK_NUMEL // max(tokens * width, 1))
    for first in range(0, batch, max(images, 1)):
        for top in range(0, tokens, max(rows, 1)):
            yield slice(first, first + images), slice(top, top + rows)


def widen_blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the tokens of half-precision ``x`` (..., B, heads, N, d), each with a float32 copy. The caller
    modifies the copy in place, and it is then written back to ``x``."""
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :]
        wide = part.to(accumulation_dtype(x))
        yield rows, wide
        part.copy_(wide)
