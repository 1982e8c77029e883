# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In inference, maps of a block of queries, mixed while they are in the cache: fewer products than with wide heads.

With gradients, fused attention of wide heads is faster than computing the blocks again for the backward pass.
"""

from typing import Optional

import torch
from torch import Tensor

from .. import forms
from . import reference

BLOCK_NUMEL = 2**18  # elements of the maps of a block, for each thread
MIN_ROWS = 32  # queries of a block, which reads all keys


def hallucinated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    grid,
    intra: Optional[Tensor] = None,
    cross: Optional[Tensor] = None,
    cross_first: bool = False,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    whole = q.dtype == forms.accumulation_dtype(q) == v.dtype and not forms.autocasts(q)
    mixed_heads = mixed_maps if whole and not (forms.records() or cross_first) else None
    return reference.hallucinated_attention(
        q, k, v, num_heads, grid, intra, cross, cross_first, mask, bias, mixed_heads=mixed_heads
    )


def mixed_maps(q: Tensor, k: Tensor, v: Tensor, cross: Tensor, bias: Optional[Tensor]) -> Tensor:
    """``softmax(sum_i c_mi q_i k_i^T + bias) v_m``, the equation in its literal order, some queries at a time.
    Arguments and result as of :func:`~.reference.wide_heads`."""
    batch, heads, queries, _ = q.shape
    k = k[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, h/2, M, d)
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    for image, row in _blocks(batch, queries, heads * k.shape[2]):
        maps = q[image, :, row] @ k[image].transpose(-1, -2)
        maps = (cross @ maps.flatten(2)).view_as(maps)
        if bias is not None:
            part = bias[image] if len(bias) > 1 else bias
            maps += part[:, :, row] if bias.shape[2] > 1 else part
        out[image, :, row] = maps.softmax(dim=-1) @ v[image]
    return out


def _blocks(batch: int, queries: int, numel: int):
    """Images and queries of each block; ``numel`` logits a query."""
    budget = BLOCK_NUMEL * torch.get_num_threads()
    rows = min(queries, max(budget // numel, MIN_ROWS))
    images = max(budget // (numel * queries), 1)  # several where their maps are small
    for first in range(0, batch, images):
        for top in range(0, queries, rows):
            yield slice(first, first + images), slice(top, top + rows)
