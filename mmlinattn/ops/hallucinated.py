# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype
from .softmax import attend
from .tokens import Grid, is_known, masked_bias, merge_heads, split_heads, to_image, unflatten

Step = Union[None, Tensor, nn.Module]  # IHH or CHH: its weight, a convolution, or None to skip it

_BLOCK_NUMEL = 2**18  # logits of a block of queries, for each thread
_MIN_ROWS = 32  # least queries of a block, since each block reads all keys


def hallucinated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    grid: Grid,
    intra: Step = None,
    cross: Step = None,
    cross_first: bool = False,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """Softmax attention that computes half of its maps and derives ("hallucinates") the others from them.

    ``A_i = q_i k_i^T / sqrt(d)``, i = 1..h/2, are the computed maps. Each row of ``A_i`` is an image on the grid of the
    keys. IHH (intra-head hallucination) convolves this image, ``B_i = w_i * A_i`` (3x3, depth-wise). CHH (cross-head
    hallucination) mixes the heads, ``H_m = sum_i c_mi B_i``. Then ``out = softmax([A, H] + bias) v``, head by head.

    IHH and CHH are linear, so they are applied to keys and queries instead of maps: ``H_m = [c_m1 q_1 | ... | c_m(h/2)
    q_(h/2)] [w_1*k_1 | ... ]^T``. The hallucinated heads become plain attention of C/2 channels, and no N x M map is
    stored: O(N + M) memory, about ``N M C (h/2 + 1)`` multiply-adds. In inference on CPUs, the maps of a few queries at
    a time are computed and mixed, with ``N M (2 C + h^2 / 4)`` multiply-adds.

    Source: "Vision Transformer with Attention Map Hallucination and FFN Compaction" (Xu et al. 2023), Eq. 2.

    Args:
        q (Tensor): Queries of the computed heads, (B, N, h/2 * d).
        k (Tensor): Keys of the computed heads, (B, M, h/2 * d).
        v (Tensor): Values of all heads, the computed ones first, (B, M, h * d); zero for masked tokens.
        num_heads (int): Number h of computed and hallucinated heads; even.
        grid (Grid): Grid of the keys, see :class:`mmlinattn.attention.Grid`. Class tokens have no neighbours and skip
            the convolution. Tokens of different ``grid.regions`` are no neighbours either.
        intra (Tensor | nn.Module, optional): Kernels w of IHH, (h/2, 3, 3), or a convolution of maps (B', h/2, height,
            width). None skips IHH.
        cross (Tensor | nn.Module, optional): Matrix c of CHH, (h/2, h/2), or a convolution of maps (B, h/2, N, M). None
            skips CHH. Without IHH and CHH, the computed maps are copied. The weight of a plain convolution is applied
            to keys and queries. Other modules (with hooks, an adapter, circular padding, a bias before IHH) are called
            on the maps, in O(N M h) memory.
        cross_first (bool): Apply CHH before IHH.
        mask (Tensor, optional): (B, M) bool, True for valid tokens. Masked tokens are no neighbours of others.
        bias (Tensor, optional): Added to the logits, broadcastable to (B, h, N, M), with four dimensions.

    Returns:
        Tensor: (B, N, h * d), in the dtype of ``v``.
    """
    if has_torch_function((q, k, v)):  # FLOP counters count the op as a whole, as they count fused attention
        options: dict = dict(intra=intra, cross=cross, cross_first=cross_first, mask=mask, bias=bias)
        return handle_torch_function(hallucinated_attention, (q, k, v), q, k, v, num_heads, grid, **options)
    kernels = _kernel(intra, 3, num_heads // 2), _kernel(cross, 1, 1)
    # a bias of CHH would be convolved by IHH after it
    if _is_other(intra, kernels[0]) or _is_other(cross, kernels[1]) or (cross_first and _bias(cross) is not None):
        return _by_maps(q, k, v, num_heads, grid, intra, cross, cross_first, mask, bias)
    intra, cross = kernels
    # In training, fused attention of wide heads is faster than recomputing blocks of maps in the backward pass.
    whole = q.dtype == accumulation_dtype(q) == v.dtype and not dispatch.autocasts(q)
    in_blocks = whole and not cross_first and dispatch.writes_in_place(q, k, v)
    mixed_heads = _mixed_maps if in_blocks else _wide_heads
    half = num_heads // 2
    dtype, width = v.dtype, int(q.shape[-1]) // half  # numbers: torch.jit.trace hands out sizes as tensors
    bias = masked_bias(bias, mask, q)
    real_bias, bias = (None, None) if bias is None else _halves(bias, half)
    queries, keys, values = split_heads(q, half), split_heads(k, half), split_heads(v, num_heads)
    real, hallucinated = values[:, :half], values[:, half:]
    real = attend(queries, keys, real, real_bias)
    local = k if intra is None else local_keys(k, grid, intra.to(k.dtype), mask, half if cross_first else 1)
    if cross is None:
        mixed = attend(queries, split_heads(local, half), hallucinated, bias)
    else:
        # (B, h/2 or 1, M, C/2): one set of keys for all hallucinated heads, or one for each
        keys = split_heads(local, local.shape[-1] // q.shape[-1])
        mixed = mixed_heads(queries, keys, hallucinated, cross * width**-0.5, bias)
    return torch.cat((real.transpose(1, 2), mixed.to(real.dtype).transpose(1, 2)), dim=2).flatten(2).to(dtype)


def _wide_heads(q: Tensor, k: Tensor, v: Tensor, cross: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Compute ``softmax([c_m1 q_1 | c_m2 q_2 | ...] k^T + bias) v_m`` of every head m by fused attention.

    Args:
        q (Tensor): (B, h/2, N, d).
        k (Tensor): (B, 1 or h/2, M, C/2), the keys of the computed heads side by side.
        v (Tensor): (B, h/2, M, d).
        cross (Tensor): c with the scale of the logits in it, (h/2, h/2).
        bias (Tensor, optional): Broadcastable to (B, h/2, N, M).

    Returns:
        Tensor: (B, h/2, N, d).
    """
    heads, width, value_width = len(cross), int(k.shape[-1]), int(v.shape[-1])
    cross = (cross * width**0.5).to(q.dtype)  # fused attention divides by it
    q = (q.transpose(1, 2).unsqueeze(1) * cross[:, None, :, None]).flatten(3)  # (B, h/2, N, C/2)
    k = k.expand(-1, heads, -1, -1)
    v = F.pad(v, (0, width - value_width))  # every device has a fused kernel for values as wide as the keys
    return attend(q, k, v, bias)[..., :value_width]


def local_keys(k: Tensor, grid: Grid, intra: Tensor, mask: Optional[Tensor], copies: int) -> Tensor:
    """Apply intra-head hallucination (IHH): a depth-wise 3x3 convolution of the keys, with one kernel per head.

    Args:
        k (Tensor): (B, M, C/2).
        grid (Grid): Grid of the keys.
        intra (Tensor): (h/2, 3, 3).
        mask (Tensor, optional): (B, M); masked tokens are set to zero.
        copies (int): 1 applies each kernel to the keys of its own head. h/2 applies each kernel to the keys of all
            heads and puts the h/2 results side by side.

    Returns:
        Tensor: (B, M, copies * C/2).
    """
    k = k if mask is None else k * mask.unsqueeze(-1).to(k.dtype)
    k = k.repeat(1, 1, copies) if copies > 1 else k
    width = int(k.shape[-1]) // len(intra)  # a number: torch.jit.trace hands out sizes as tensors
    weight = intra[:, None].expand(-1, width, -1, -1).reshape(-1, 1, *intra.shape[1:])
    if grid.regions is None:
        return _convolve_grid(k, grid, weight)
    # a cyclically shifted window holds up to four parts of the map that do not adjoin
    regions = grid.regions.repeat(k.shape[0] // grid.regions.shape[0], 1).unsqueeze(-1)
    parts = ((regions == region).to(k.dtype) for region in range(4))
    return sum(part * _convolve_grid(k * part, grid, weight) for part in parts)  # type: ignore[return-value]


def _convolve_grid(k: Tensor, grid: Grid, weight: Tensor) -> Tensor:
    """Convolve keys (B, M, C) depth-wise on their grid; class tokens are unchanged."""
    if is_known(grid.height, grid.width) and 0 in (grid.height, grid.width):  # PyTorch raises for maps without a pixel
        return k
    image = to_image(unflatten(k[:, grid.prefix :], 1, (grid.height, grid.width)))
    local = F.conv2d(image, weight, padding=1, groups=len(weight)).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat((k[:, : grid.prefix].to(local.dtype), local), dim=1) if grid.prefix else local


def _halves(bias: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the bias of the computed heads and the bias of the hallucinated heads."""
    return (bias, bias) if bias.shape[1] == 1 else (bias[:, :half], bias[:, half:])


def _kernel(step: Step, size: int, groups: int) -> Optional[Tensor]:
    """Return the weight of a hallucination step: kernels (h/2, 3, 3) of IHH, or the matrix (h/2, h/2) of CHH.

    None stands for a module other than a plain convolution of this kernel ``size`` and these ``groups``.

    The convolution's bias has no effect: it adds the same value to all logits of a query, which softmax ignores. It is
    multiplied by 0 rather than left out, since distributed training expects a gradient of it.
    """
    if not isinstance(step, nn.Module):
        return step
    if not private_apis.is_weighted_conv(step):
        return None
    conv: Any = step
    found = conv.kernel_size, conv.padding, conv.stride, conv.dilation, conv.groups, conv.padding_mode
    if found != ((size, size), (size // 2, size // 2), (1, 1), (1, 1), groups, 'zeros'):
        return None
    weight = private_apis.renewed_weight(conv)
    kernel = weight[:, 0] if size > 1 else weight[:, :, 0, 0]
    return kernel if conv.bias is None else kernel + 0 * conv.bias.sum()


def _is_other(step: Step, kernel: Optional[Tensor]) -> bool:
    """Return True for a hallucination step whose weight :func:`_kernel` cannot return."""
    return step is not None and kernel is None


def _bias(step: Step) -> Optional[Tensor]:
    return getattr(step, 'bias', None) if isinstance(step, nn.Module) else None


# --- modules that are more than their weights: on the maps ------------------------------------------------------------


def _by_maps(q, k, v, num_heads, grid: Grid, intra: Any, cross: Any, cross_first, mask, bias) -> Tensor:
    """Compute hallucinated attention (Xu et al. 2023, Eq. 2) by explicit attention maps (B, h, N, M). It runs if
    ``intra`` or ``cross`` is a module other than a plain convolution. Arguments and result as of
    :func:`hallucinated_attention`."""
    half = num_heads // 2
    queries, keys, values = split_heads(q, half), split_heads(k, half), split_heads(v, num_heads)
    maps = real = (queries * int(queries.shape[-1]) ** -0.5) @ keys.transpose(-1, -2)  # (B, h/2, N, M)
    if cross_first and cross is not None:
        maps = cross(maps)
    if intra is not None:
        maps = _on_rows(intra, maps if mask is None else maps * mask[:, None, None].to(maps.dtype), grid)
    if cross is not None and not cross_first:
        maps = cross(maps)
    logits = torch.cat((real, maps.to(real.dtype)), dim=1)
    bias = masked_bias(bias, mask, logits)
    logits = logits if bias is None else logits + bias
    weights = logits.softmax(dim=-1, dtype=accumulation_dtype(logits)).to(v.dtype)
    return merge_heads(weights @ values).to(v.dtype)


def _on_rows(intra: nn.Module, maps: Tensor, grid: Grid) -> Tensor:
    """Apply IHH to maps (B, h/2, N, M): each row is an image on the grid of the keys."""
    batch, half, queries, keys = maps.shape
    rows = maps.transpose(1, 2).reshape(batch * queries, half, keys)
    images = unflatten(rows[..., grid.prefix :], 2, (grid.height, grid.width))
    if grid.regions is None:
        local = intra(images)
    else:
        regions = grid.regions.repeat(batch // grid.regions.shape[0], 1).repeat_interleave(queries, dim=0)
        regions = unflatten(regions[:, None], 2, (grid.height, grid.width))
        parts = [(regions == region).to(images.dtype) for region in range(4)]
        local = sum(part * intra(images * part) for part in parts)
    if grid.prefix:  # the bias is subtracted: class tokens lack it, so softmax would not cancel it
        local = torch.cat((rows[..., : grid.prefix], (local - intra(torch.zeros_like(images[:1]))).flatten(2)), dim=2)
    return unflatten(local.flatten(2), 0, (batch, queries)).transpose(1, 2)


# --- on CPUs, in inference: maps of a block of queries, mixed while they are in the cache -----------------------------


def _mixed_maps(q: Tensor, k: Tensor, v: Tensor, cross: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Compute ``softmax(sum_i c_mi q_i k_i^T + bias) v_m`` of every head m by the explicit maps of a block of queries.

    Args:
        q (Tensor): (B, h/2, N, d).
        k (Tensor): (B, 1, M, C/2), the keys of the computed heads side by side.
        v (Tensor): (B, h/2, M, d).
        cross (Tensor): c with the scale of the logits in it, (h/2, h/2).
        bias (Tensor, optional): Broadcastable to (B, h/2, N, M).

    Returns:
        Tensor: (B, h/2, N, d).
    """
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


def _blocks(batch: int, queries: int, numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of images and of queries of each block; ``numel`` is the number of logits of one query."""
    budget = _BLOCK_NUMEL * torch.get_num_threads()
    rows = max(min(queries, max(budget // max(numel, 1), _MIN_ROWS)), 1)
    images = max(budget // max(numel * queries, 1), 1)  # several if their maps are small
    for first in range(0, batch, images):
        for top in range(0, queries, rows):
            yield slice(first, first + images), slice(top, top + rows)
