# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tensors of tokens: heads, maps, products by head, padding; and arithmetic of sizes that holds in graphs for other
sizes."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype

Both = Union[Tensor, tuple[Tensor, Tensor]]  # queries and keys (B, heads, N, d), of equal shapes in one (2, ...)
# Elements of the intermediate results that an op makes at once on CPUs: a bound of its memory. Smaller blocks mean more
# parallel regions, and each waits for its last thread.
BLOCK_NUMEL = 2**21


def unflatten(x: Tensor, dim: int, sizes) -> Tensor:
    """``x.unflatten(dim, sizes)``; ``torch.onnx.export(..., dynamo=False)`` would make the sizes constants. One may be
    -1."""
    if dispatch.state.settled:
        return torch.unflatten(x, dim, sizes)
    dim, known, open_at = dim % x.dim(), 1, None
    sizes = list(sizes)
    for i, size in enumerate(sizes):
        if type(size) is int and size == -1:
            open_at = i
        else:
            known = known * size
    if open_at is not None:  # of no elements, a reshape could not tell
        sizes[open_at] = x.shape[dim] // known
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * d) -> (B, heads, N, d), a view."""
    return unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def pair_by_head(q: Tensor, k: Tensor, num_heads: int) -> Optional[Tensor]:
    """Queries and keys (B, N, heads * d) as one (2, B, heads, N, d), a view: an operation on both is one pass over the
    memory then. None unless they are adjacent slices of one projection."""
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


def copies_by_head(q: Tensor, k: Tensor, num_heads: int, dtype: torch.dtype) -> Any:
    """Copy queries and keys (B, N, heads * d) by head: (2, B, heads, N, d), or two tensors of different shapes.

    On CPUs the heads of a token are contiguous, elsewhere the tokens of a head: GPU products need no further copy.
    """
    if q.shape != k.shape:
        return copy_by_head(q, num_heads, dtype), copy_by_head(k, num_heads, dtype)
    (batch, tokens, _), width = q.shape, q.shape[-1] // num_heads
    if dispatch.on_cpu(q):
        both = q.new_empty(batch, tokens, 2, num_heads, width, dtype=dtype).permute(2, 0, 3, 1, 4)
    else:
        both = q.new_empty(2, batch, num_heads, tokens, width, dtype=dtype)
    pair = pair_by_head(q, k, num_heads)
    if pair is not None:
        return both.copy_(pair)
    for place, x in zip(both, (q, k)):
        place.copy_(split_heads(x, num_heads))
    return both


def copy_by_head(x: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """One tensor of :func:`copies_by_head`."""
    if dispatch.on_cpu(x):
        return split_heads(x.to(dtype, copy=True, memory_format=torch.contiguous_format), num_heads)
    return split_heads(x, num_heads).to(dtype, copy=True, memory_format=torch.contiguous_format)


def gradients_by_head(q: Tensor, k: Tensor, num_heads: int) -> tuple[Sequence[Tensor], Both]:
    """Allocate the gradients of queries and keys; also return them by head, in one tensor if of equal shapes."""
    if q.shape != k.shape or q.dtype != k.dtype:
        made = torch.empty_like(q), torch.empty_like(k)
        return made, (split_heads(made[0], num_heads), split_heads(made[1], num_heads))
    pair = q.new_empty(2, *q.shape)
    return list(pair), torch.unflatten(pair, -1, (num_heads, -1)).transpose(2, 3)


def are_attended(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> bool:
    """Return True for queries, keys and values of ``num_heads`` heads. The reference broadcasts others, or raises."""
    for t in (q, k, v):
        if t.dim() != 3 or not t.numel() or not t.is_floating_point():
            return False
    return (
        num_heads > 0
        and k.shape[::2] == q.shape[::2]
        and v.shape[:2] == k.shape[:2]
        and q.shape[-1] % num_heads == v.shape[-1] % num_heads == 0
    )


def product_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """Return the type of matrix products: bfloat16 on GPUs, float32 for half precision elsewhere. Quotients leave the
    range of float16."""
    if q.dtype == v.dtype == torch.bfloat16 and not dispatch.on_cpu(q):
        return torch.bfloat16
    return torch.promote_types(accumulation_dtype(q), v.dtype)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, heads * d); a view if the heads of a token are adjacent."""
    x = x.transpose(1, 2)
    return (x if dispatch.state.settled else clone_if_open(x)).flatten(2)


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, heads * d) -> (1, B, heads, N, d), a view: :func:`split_heads` for the references of linear attention.

    Of five axes, since Inductor keeps every tensor of four channels-last in models with convolutions: heads come to lie
    innermost. That copies each map, and its C++ code for sums in that order writes past the end of their memory if
    the number of heads is no multiple of the vector's length (PyTorch 2.11, pytorch/pytorch#196681). Not by
    einops: it drops axes of one until the others are in order, so that Inductor would see four.
    """
    batch, tokens, channels = x.shape
    return x.reshape(1, batch, tokens, num_heads, channels // num_heads).transpose(2, 3)


def tokens_of(x: Tensor) -> Tensor:
    """(1, B, heads, N, d) -> (B, N, heads * d), back from :func:`heads_of`."""
    _, batch, heads, tokens, width = x.shape
    return clone_if_open(x.transpose(2, 3)).reshape(batch, tokens, heads * width)


def clone_if_open(x: Tensor) -> Tensor:
    """Return ``x``, or in a graph with a dynamic size that may be 1, a contiguous clone.

    For another layout PyTorch compares the size with 1, and export would add that as a guard.
    """
    if dispatch.state.settled:
        return x
    if any(isinstance(size, torch.SymInt) and not private_apis.is_surely_above_one(size) for size in x.shape):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def to_image(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view in channels-last memory unless :func:`clone_if_open` copies it."""
    x = x.permute(0, 3, 1, 2)
    return x if dispatch.state.settled else clone_if_open(x)


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Scalar products of (..., B, heads, N, d) by (..., B, heads, N or 1, d), (..., B, heads, N, 1)."""
    # on CPUs, matrix products of few columns take several times as long as the sum of products
    if y.shape[-2] == 1 and not dispatch.on_cpu(x):
        return x @ y.transpose(-1, -2)
    return torch.linalg.vecdot(x, y).unsqueeze(-1)


def multiply_by_head(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` of (B, heads, N, e) in ``dtype``, laid as :func:`copies_by_head` lays tokens."""
    layout = torch.preserve_format if dispatch.on_cpu(x) else torch.contiguous_format
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype, memory_format=layout))


def subtract(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """``x - y`` in ``dtype``, by one operation."""
    if dispatch.on_cpu(x):
        return (x - y).to(dtype)
    return torch.sub(x, y, out=x.new_empty(x.shape, dtype=dtype))


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


def widened(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the tokens of (..., B, heads, N, d) in half precision, and a float32 copy of each; the copy is written
    back after it was modified in place."""
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :]
        wide = part.to(accumulation_dtype(x))
        yield rows, wide
        part.copy_(wide)


# --- counts, means and guards of padded tokens ------------------------------------------------------------------------

# Sizes enter as numbers and never as tensors made from them, so that a recorded graph keeps them free.
TokenCount = Union[int, Tensor]


def count_tokens(x: Tensor, mask: Optional[Tensor]) -> TokenCount:
    """Number of real tokens of (..., B, heads, N, d): N, or (B, 1, 1, 1) with a mask, at least 1."""
    if mask is None:
        count: Any = x.shape[-2]
        if isinstance(count, Tensor):  # by torch.jit.trace; the root of an int would be of the default type
            return count.to(accumulation_dtype(x))
        return max(count, 1) if is_known(count) else count
    global _last_count
    wide = accumulation_dtype(x)
    if dispatch.needs_reference(mask):
        return _count(mask, wide)
    found, dtype, count = _last_count
    if found() is not mask or dtype != wide:
        count = _count(mask, wide)
        _last_count = weakref.ref(mask), wide, count
    return count


def _count(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.sum(dim=1)[:, None, None, None].clamp(min=1).to(dtype)


# of the last mask: the blocks of a stage share one
_last_count: tuple[Callable, Any, Any] = (lambda: None, None, None)


def inverse_sqrt(count: TokenCount) -> Union[float, Tensor]:
    """Return ``count ** -0.5``: 1 / N leaves the range of float16, its root on each of two factors does not."""
    return count**-0.5


def token_mean(x: Tensor, mask: Optional[Tensor], count: TokenCount) -> Tensor:
    """Mean over the real tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better."""
    wide = accumulation_dtype(x)
    if mask is None:
        return x.sum(dim=-2, keepdim=True, dtype=wide) / count
    if dispatch.on_cpu(x):  # a product with the mask is a masked sum without a masked copy
        return (mask[:, None, None].to(wide) @ x.to(wide)) / count
    return (x * mask[:, None, :, None]).sum(dim=-2, keepdim=True, dtype=wide) / count


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """``eps``, or (B, 1, 1, 1) with 1 more for items that consist of padding alone.

    Their sum of keys is zero. So are their values, and the result is zero for every divisor; 1 keeps queries and
    gradients in range; a division by ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


# --- sizes ------------------------------------------------------------------------------------------------------------
#
# Height and width of a map are ints in eager mode, symbols in torch.compile and torch.export, and tensors without
# dimensions in torch.jit.trace. Comparing symbols or tensors in Python writes the answer for one size into the graph.
# Negative numbers are divided in another way by graphs than by Python, so nothing here divides one.


def is_known(*sizes) -> bool:
    """Return True if all sizes are numbers, not symbols or tensors of a graph."""
    if dispatch.state.settled:
        return True
    if any(isinstance(size, Tensor) for size in sizes):
        return False
    return all(private_apis.has_static_value(size) for size in sizes)


def round_up(size, step: int):
    """The smallest multiple of ``step`` that is not below ``size``, positive."""
    return (size + step - 1) // step * step


def as_tensor(size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A size, known or not, as a tensor without dimensions on the device of ``like``."""
    if isinstance(size, Tensor):
        return size.to(device=like.device, dtype=dtype)
    return torch.scalar_tensor(size, dtype=dtype, device=like.device)
