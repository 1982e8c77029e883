# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Split and merge attention heads, of queries and keys in one tensor too; products by head; blocks of tokens."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import dispatch
from .sizes import clone_if_dynamic, is_known

# Elements of a block on CPUs. Smaller blocks mean more parallel regions, and each waits for its last thread.
BLOCK_NUMEL = 2**21


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split channels into heads: (B, N, heads * d) -> (B, heads, N, d), a view."""
    batch, tokens, channels = x.shape
    return x.reshape(batch, tokens, num_heads, channels // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Merge heads: (B, heads, N, d) -> (B, N, heads * d), a view if the heads of a token are adjacent in memory."""
    return clone_if_dynamic(x.transpose(1, 2)).flatten(2)


def split_heads_5d(x: Tensor, num_heads: int) -> Tensor:
    """Split channels into heads for reference implementations: (B, N, heads * d) -> (1, B, heads, N, d), a view.

    The fifth axis avoids a bug of Inductor (PyTorch 2.11, pytorch/pytorch#196681). In models with convolutions,
    Inductor lays out every 4-d tensor channels-last, with heads innermost, and so copies each tensor. Its C++ code for
    sums in that order writes out of bounds if the number of heads is no multiple of the vector length. einops would
    drop the axis of size 1 before the permutation, and Inductor would see a 4-d tensor.
    """
    batch, tokens, channels = x.shape
    if num_heads == 1:  # runtimes copy a feature map to move an axis of size 1
        return x.reshape(1, batch, 1, tokens, channels)
    return x.reshape(1, batch, tokens, num_heads, channels // num_heads).transpose(2, 3)


def merge_heads_5d(x: Tensor) -> Tensor:
    """Invert :func:`split_heads_5d`: (1, B, heads, N, d) -> (B, N, heads * d)."""
    _, batch, heads, tokens, width = x.shape
    if is_known(heads) and heads == 1:
        return x.reshape(batch, tokens, width)
    return clone_if_dynamic(x.transpose(2, 3)).reshape(batch, tokens, heads * width)


def split_pair(q: Tensor, k: Tensor, num_heads: int) -> Optional[Tensor]:
    """View queries and keys (B, N, heads * d) as one tensor (2, B, heads, N, d), so that one kernel can process both.
    Return None unless they are adjacent slices of one projection."""
    width = q.shape[-1]
    side_by_side = (
        q.shape == k.shape
        and q.stride() == k.stride()
        and q.dtype == k.dtype
        and q.stride(-1) == 1
        and min(q.stride()[:2]) >= 2 * width
        and k.storage_offset() == q.storage_offset() + width
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )
    if not side_by_side:
        return None
    pair = q.as_strided((*q.shape[:-1], 2 * width), q.stride())
    return torch.unflatten(pair, -1, (2, num_heads, -1)).permute(2, 0, 3, 1, 4)


def copy_pair(
    q: Tensor, k: Tensor, num_heads: int, dtype: torch.dtype, write: Callable[[Tensor, Tensor], Any] = Tensor.copy_
) -> Tensor:
    """Copy queries and keys of one shape, (B, N, heads * d), to (2, B, heads, N, d) by ``write(destination, source)``.

    On CPUs the heads of a token are contiguous. On GPUs the tokens of a head are, so that matmuls need no copy.
    """
    (batch, tokens, _), width = q.shape, q.shape[-1] // num_heads
    if dispatch.on_cpu(q):
        both = q.new_empty(batch, tokens, 2, num_heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    else:
        both = q.new_empty(2, batch, num_heads, tokens, width, dtype=dtype)
    pair = split_pair(q, k, num_heads)
    if pair is not None:
        write(both, pair)
    else:
        write(both[0], split_heads(q, num_heads))
        write(both[1], split_heads(k, num_heads))
    return both


def copy_heads(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Copy (B, N, heads * d) to (B, heads, N, d) in the memory layout of :func:`copy_pair`."""
    if dispatch.on_cpu(x):
        return split_heads(x.to(dtype, copy=True, memory_format=torch.contiguous_format), num_heads)
    return split_heads(x, num_heads).to(dtype, copy=True, memory_format=torch.contiguous_format)


def empty_pair(q: Tensor, num_heads: int) -> tuple[Sequence[Tensor], Tensor]:
    """Allocate the gradients of queries and keys, (B, N, heads * d), and return both with their view by head,
    (2, B, heads, N, d)."""
    pair = q.new_empty(2, *q.shape)
    return list(pair), torch.unflatten(pair, -1, (num_heads, -1)).transpose(2, 3)


def have_attention_shapes(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> bool:
    """Return True if q, k and v are floating-point, not empty, and of matching shapes. The reference implementation
    takes others, or raises."""
    for t in (q, k, v):
        if t.dim() != 3 or not t.numel() or not t.is_floating_point():
            return False
    return (
        num_heads > 0
        and k.shape[::2] == q.shape[::2]
        and v.shape[:2] == k.shape[:2]
        and q.shape[-1] % num_heads == v.shape[-1] % num_heads == 0
    )


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the scalar products of (..., heads, N, d) and (..., heads, N or 1, d) along d, (..., heads, N, 1)."""
    # on CPUs, a matmul with a single column takes several times as long as a sum of products
    if y.shape[-2] == 1 and not dispatch.on_cpu(x):
        return x @ y.transpose(-1, -2)
    return torch.linalg.vecdot(x, y).unsqueeze(-1)


def scale_heads(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x * factor`` of (B, heads, N, e) in ``dtype``, in the memory layout of :func:`copy_pair`."""
    layout = torch.preserve_format if dispatch.on_cpu(x) else torch.contiguous_format
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype, memory_format=layout))


def subtract(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``x - y`` in ``dtype``, on GPUs by one kernel."""
    if dispatch.on_cpu(x):
        return (x - y).to(dtype)
    return torch.sub(x, y, out=x.new_empty(x.shape, dtype=dtype))


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
        wide = part.to(dispatch.accumulation_dtype(x))
        yield rows, wide
        part.copy_(wide)
