# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tokens of attention: grids, dynamic sizes, heads, and padding.

Height and width of a map are ints in eager mode, symbols in ``torch.compile`` and ``torch.export``, and 0-d tensors in
``torch.jit.trace``. A comparison of symbols or tensors in Python fixes its result for the traced size in the graph.
Graphs and Python round quotients of negative numbers differently, so no function here divides one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype

# Elements of a block on CPUs. Smaller blocks mean more parallel regions, and each waits for its last thread.
BLOCK_NUMEL = 2**21
Size = Any  # int in eager mode, torch.SymInt or 0-d tensor in a graph


def is_known(*sizes: Size) -> bool:
    """Return True if all sizes are Python numbers rather than symbols or tensors of a graph."""
    may_be_symbol = private_apis.compiler.is_dynamo_compiling()  # there the type of a symbol is int
    for size in sizes:
        if type(size) is int and not may_be_symbol:
            continue
        if isinstance(size, Tensor) or not private_apis.has_static_value(size):
            return False
    return True


def round_up(size: Size, step: int) -> Size:
    """Return the smallest multiple of ``step`` >= ``size``, for positive sizes."""
    return (size + step - 1) // step * step


def as_tensor(size: Size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a size to a 0-d tensor on the device of ``like``. A size of a trace, already a tensor, stays on the CPU,
    which operators on every device accept."""
    if isinstance(size, Tensor):
        return size.to(dtype)
    return torch.scalar_tensor(size, dtype=dtype, device=like.device)


def arange(count: Size, like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Return 0, 1, ..., ``count - 1`` on the device of ``like``. Traces name no device, so they run on any."""
    if torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export():
        return (like.new_ones(count, dtype=torch.long).cumsum(0) - 1).to(dtype)
    return torch.arange(count, dtype=dtype, device=like.device)


def unflatten(x: Tensor, dim: int, sizes: Sequence[Size]) -> Tensor:
    """Compute ``x.unflatten(dim, sizes)``; one of ``sizes`` may be -1. ``torch.onnx.export(..., dynamo=False)`` would
    write the sizes of PyTorch's own method into the graph as constants."""
    if not dispatch.is_traced():
        return torch.unflatten(x, dim, sizes)
    dim, known, open_at = dim % x.dim(), 1, None
    sizes = list(sizes)
    for i, size in enumerate(sizes):
        if type(size) is int and size == -1:
            open_at = i
        else:
            known = known * size
    if open_at is not None:  # reshape cannot infer a size of a tensor without elements
        sizes[open_at] = x.shape[dim] // known
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def clone_if_dynamic(x: Tensor) -> Tensor:
    """Return a contiguous clone of ``x`` in a graph with a dynamic size that may be 1, otherwise ``x`` itself. For a
    non-contiguous tensor PyTorch compares the size with 1, and export would add this comparison as a guard."""
    for size in x.shape:
        if type(size) is not int and isinstance(size, torch.SymInt) and not private_apis.is_surely_above_one(size):
            return x.clone(memory_format=torch.contiguous_format)
    return x


def to_image(x: Tensor) -> Tensor:
    """Move channels first: (B, H, W, C) -> (B, C, H, W), a view unless :func:`clone_if_dynamic` copies it."""
    return clone_if_dynamic(x.permute(0, 3, 1, 2))


def from_image(x: Tensor) -> Tensor:
    """Move channels last: (B, C, H, W) -> (B, H, W, C), a view."""
    return x.permute(0, 2, 3, 1)


class Grid(NamedTuple):
    """Layout of a token sequence: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    Attributes:
        height, width, prefix: Numbers of rows, columns and class tokens.
        within: Height and width to which position tables are resized, if they differ from ``height`` and ``width``. A
            window that is cropped at the right or lower border uses the table of the whole window, from its top left.
            In graphs of dynamic sizes, the grid includes padding, and ``within`` is cropped to the feature map.
        regions: (windows, N) int64, 0 to 3, for cyclically shifted windows; tokens of different regions are no
            neighbours.
    """

    height: int
    width: int
    prefix: int = 0
    within: Optional[tuple[int, int]] = None
    regions: Optional[Tensor] = None

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.height * self.width


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """View patch tokens of (B, prefix + h * w, C) as a feature map (B, C, h, w) in channels-last memory."""
    image = x[:, grid.prefix :].reshape(x.shape[0], grid.height, grid.width, x.shape[2]).permute(0, 3, 1, 2)
    return clone_if_dynamic(image)


def on_grid(conv: Callable[[Tensor], Tensor], x: Tensor, grid: Grid) -> Tensor:
    """Apply ``conv``, a convolution of (B, C, h, w) maps, to the patch tokens of (B, N, C). Class tokens have no
    neighbours, so the result is zero there."""
    local = conv(to_map(x, grid)).permute(0, 2, 3, 1).flatten(1, 2)  # a view if the memory is channels-last
    return F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local


# --- heads ------------------------------------------------------------------------------------------------------------


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
    """Copy queries and keys of one shape, (B, N, heads * d), to a new tensor (2, B, heads, N, d) of ``dtype``.

    On CPUs the heads of a token are contiguous in it. On GPUs the tokens of a head are, so that matmuls need no copy.
    ``write(destination, source)`` fills it in place. It is called once with (2, B, heads, N, d) if :func:`split_pair`
    finds one view of both. Else it is called for the queries and for the keys, (B, heads, N, d).
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
    """Split heads in a copy of type ``dtype``: (B, N, heads * d) -> (B, heads, N, d).

    On CPUs, the heads of a token are contiguous in memory. On GPUs, the tokens of a head are.
    """
    if dispatch.on_cpu(x):
        return split_heads(x.to(dtype, copy=True, memory_format=torch.contiguous_format), num_heads)
    return split_heads(x, num_heads).to(dtype, copy=True, memory_format=torch.contiguous_format)


def empty_pair(q: Tensor, num_heads: int) -> tuple[Sequence[Tensor], Tensor]:
    """Allocate the gradients of queries and keys, (B, N, heads * d), and return both with one view of the two by head,
    (2, B, heads, N, d)."""
    pair = q.new_empty(2, *q.shape)
    return list(pair), torch.unflatten(pair, -1, (num_heads, -1)).transpose(2, 3)


def have_attention_shapes(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> bool:
    """Return True if q, k and v are floating-point, not empty, and of matching shapes. The reference implementation
    computes other inputs, or raises."""
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
    modifies the copy in place; afterwards the copy is written back to ``x``."""
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :]
        wide = part.to(accumulation_dtype(x))
        yield rows, wide
        part.copy_(wide)


# --- padding ----------------------------------------------------------------------------------------------------------


def count_tokens(x: Tensor, mask: Optional[Tensor]) -> Union[int, Tensor]:
    """Return the number of valid tokens of (B, heads, N, d) in eager mode, at least 1: N, or (B, 1, 1, 1) with a mask.
    Reference implementations use :func:`root_weights` instead, as graphs in float16 cannot hold large counts."""
    if mask is None:
        return max(x.shape[-2], 1)
    count = getattr(mask, 'token_count', None)
    return (_count(mask) if count is None else count).to(accumulation_dtype(x))


def keep_count(mask: Optional[Tensor]) -> Optional[Tensor]:
    """Store the token count of ``mask`` as its attribute, shared by all blocks of a stage. Nobody may write to it."""
    if mask is not None and not dispatch.needs_reference(mask):
        mask.token_count = _count(mask)  # type: ignore[attr-defined]
    return mask


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dim=1, dtype=torch.float32)[:, None, None, None].clamp_(min=1)


def root_weights(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return square roots of equal weights of the valid tokens, 0 for padding: (..., N, 1) with squares that sum to 1.

    Reference implementations multiply both factors of a sum over tokens by them. In float16, N overflows from 65,520
    tokens on, and 1 / N is subnormal from 16,385 on. Tokens are counted in units of 256, so intermediate results stay
    in range.
    """
    valid = torch.ones_like(x[:1, ..., :1]) if mask is None else mask[:, None, :, None]
    valid = valid.to(accumulation_dtype(x)) / 16
    return valid / (valid * valid).sum(dim=-2, keepdim=True).clamp(min=1 / 256).sqrt()


def token_mean(x: Tensor, mask: Optional[Tensor], zero_padded: bool = False) -> Tensor:
    """Mean over the valid tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better.

    Args:
        mask (Tensor, optional): (B, N) bool, True for valid tokens.
        zero_padded (bool): Padded tokens are zero, so that the mask is needed for their number only.
    """
    wide = accumulation_dtype(x)
    if mask is None:
        return x.mean(dim=-2, keepdim=True, dtype=wide)
    if dispatch.needs_reference(x, mask):
        root = root_weights(x, mask)
        return root.transpose(-1, -2) @ (x * root)
    if dispatch.on_cpu(x):  # a matmul with the mask sums the valid tokens without a masked copy
        return (mask[:, None, None].to(wide) @ x.to(wide)) / count_tokens(x, mask)
    x = x if zero_padded else x * mask[:, None, :, None]
    return x.sum(dim=-2, keepdim=True, dtype=wide) / count_tokens(x, mask)


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """Return ``eps``, or with a mask a tensor (B, 1, 1, 1): ``eps``, plus 1 for items that consist of padding alone.

    Keys and values of such an item sum to zero, so its result is zero for every divisor. A divisor of 1 keeps queries
    and gradients in range; ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


def masked_logit(dtype: torch.dtype) -> float:
    """Return the logit that hides a key: its exponential is 0 beside any valid key. It is finite, so that the softmax
    over hidden keys alone (all padding) is finite too."""
    return torch.finfo(dtype).min / 4


def masked_bias(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """Return ``bias`` in the type of ``like``, plus large negative logits for keys that ``mask`` (B, M) hides. Without
    bias and mask the result is None."""
    if mask is not None:
        hidden = like.new_zeros(mask.shape)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        return hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)
