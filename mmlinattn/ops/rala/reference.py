# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from torch import Tensor

from ..forms import accumulation_dtype
from ..kernels import LOWEST_EXPONENT, kernel_map
from ..masks import count_tokens, divisor, padded_eps
from ..memory import heads_of, tokens_of
from ..rotary.reference import rotate


def rala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    kernel: str = 'elu',
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    weight_scale: Optional[float] = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    q, k = kernel_map(q, kernel), kernel_map(k, kernel)
    wide = accumulation_dtype(q)
    count = count_tokens(k, mask)  # N, or (B, 1, 1, 1)
    real = None if mask is None else mask[:, None, :, None]  # (B, 1, N, 1)
    if weight_scale is not None:
        mean_query = (q if real is None else q * real).sum(dim=-2, keepdim=True, dtype=wide) / count
        logits = (k @ mean_query.to(k.dtype).transpose(-1, -2)).to(wide) * weight_scale  # (B, heads, N, 1)
        weight = token_weights(logits, mask)  # a / N
    else:
        weight = (torch.ones_like(k[:, :1, :1, :, :1]) if real is None else real).to(wide) / count
    key_mean = (k.transpose(-1, -2).to(wide) @ weight).to(q.dtype)  # mean_j(a_j k_j), (B, heads, d, 1)
    normaliser = (q @ key_mean).to(wide) + padded_eps(eps, mask, wide)
    q = (q / normaliser).to(q.dtype)  # dividing the result instead would keep one map more for the backward pass
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N leaves the range of float16; its root on each factor does not
        k, v = (k * divisor(count)).to(q.dtype), (v * (weight / divisor(count))).to(q.dtype)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return tokens_of(q @ (k.transpose(-1, -2) @ v))


def token_weights(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Softmax over the real tokens of (B, heads, N, 1); none of the weights is a denormal number."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    # not minus infinity: where all tokens are padding, the weights and their gradients would be NaN
    lowest = torch.finfo(logits.dtype).min
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    logits = torch.maximum(logits, logits.amax(dim=-2, keepdim=True) + LOWEST_EXPONENT)
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    return logits.softmax(dim=-2)
