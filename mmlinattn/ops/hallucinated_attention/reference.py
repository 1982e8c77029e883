# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import forms
from ..memory import split_heads
from ..sizes import to_image
from ..softmax_attention import masked_logit
from ..softmax_attention import reference as softmax


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Softmax attention of (B, heads, N, d) tensors in its best form."""
    return forms.pick(softmax, q, k, v).attend(q, k, v, bias)


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
    mixed_heads: Optional[Callable] = None,
) -> Tensor:
    """``mixed_heads``: how heads that are mixtures of others attend, :func:`wide_heads` by default."""
    half = num_heads // 2
    dtype, width = v.dtype, q.shape[-1] // half
    bias = hide(bias, mask, q)
    real_bias, bias = (None, None) if bias is None else halves(bias, half)
    queries, keys, values = split_heads(q, half), split_heads(k, half), split_heads(v, num_heads)
    real, hallucinated = values[:, :half], values[:, half:]
    real = attend(queries, keys, real, real_bias)
    local = k if intra is None else local_keys(k, grid, intra.to(k.dtype), mask, half if cross_first else 1)
    if cross is None:
        mixed = attend(queries, split_heads(local, half), hallucinated, bias)
    else:
        # (B, h/2 or 1, M, C/2): one set of keys for all hallucinated heads, or one for each
        keys = split_heads(local, local.shape[-1] // q.shape[-1])
        mixed = (mixed_heads or wide_heads)(queries, keys, hallucinated, cross * width**-0.5, bias)
    return torch.cat((real.transpose(1, 2), mixed.to(real.dtype).transpose(1, 2)), dim=2).flatten(2).to(dtype)


def wide_heads(q: Tensor, k: Tensor, v: Tensor, cross: Tensor, bias: Optional[Tensor]) -> Tensor:
    """``softmax([c_m1 q_1 | c_m2 q_2 | ...] k^T + bias) v_m`` of every head m, by fused attention.

    Args:
        q (Tensor): (B, h/2, N, d).
        k (Tensor): (B, 1 or h/2, M, C/2), the keys of the real heads side by side.
        v (Tensor): (B, h/2, M, d).
        cross (Tensor): c with the scale of the logits in it, (h/2, h/2).
        bias (Tensor, optional): Broadcastable to (B, h/2, N, M).

    Returns:
        Tensor: (B, h/2, N, d).
    """
    heads, width, value_width = len(cross), k.shape[-1], v.shape[-1]
    cross = (cross * width**0.5).to(q.dtype)  # fused attention divides by it
    q = (q.transpose(1, 2).unsqueeze(1) * cross[:, None, :, None]).flatten(3)  # (B, h/2, N, C/2)
    k = k.expand(-1, heads, -1, -1)
    v = F.pad(v, (0, width - value_width))  # with values as wide as the keys, it stays fused everywhere
    return attend(q, k, v, bias)[..., :value_width]


def local_keys(k: Tensor, grid, intra: Tensor, mask: Optional[Tensor], copies: int) -> Tensor:
    """IHH on the keys: the depth-wise 3x3 over their grid, one kernel a head.

    Args:
        k (Tensor): (B, M, C/2).
        grid (Grid): Of the keys.
        intra (Tensor): (h/2, 3, 3).
        mask (Tensor, optional): (B, M); what others hold does not matter.
        copies (int): 1, or h/2: each head's kernel on all keys, side by side.

    Returns:
        Tensor: (B, M, copies * C/2).
    """
    k = k if mask is None else k * mask.unsqueeze(-1).to(k.dtype)
    k = k.repeat(1, 1, copies) if copies > 1 else k
    weight = intra.repeat_interleave(k.shape[-1] // len(intra), dim=0).unsqueeze(1)
    if grid.regions is None:
        return _convolved(k, grid, weight)
    # a rolled window holds up to four parts of the map that are no neighbours of each other
    regions = grid.regions.repeat(k.shape[0] // grid.regions.shape[0], 1).unsqueeze(-1)
    parts = ((regions == region).to(k.dtype) for region in range(4))
    return sum(part * _convolved(k * part, grid, weight) for part in parts)


def _convolved(k: Tensor, grid, weight: Tensor) -> Tensor:
    image = to_image(k[:, grid.prefix :].unflatten(1, (grid.height, grid.width)))
    local = F.conv2d(image, weight, padding=1, groups=len(weight)).permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat((k[:, : grid.prefix].to(local.dtype), local), dim=1) if grid.prefix else local


def hide(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """``bias`` plus what hides the masked keys; finite, so that a row of hidden keys alone stays so."""
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        bias = hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)


def halves(bias: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The bias of the real and of the hallucinated heads."""
    return (bias, bias) if bias.shape[1] == 1 else (bias[:, :half], bias[:, half:])
