# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from ..forms import accumulation_dtype
from ..kernels import kernel_map
from ..masks import count_tokens, divisor, padded_eps, token_mean
from ..memory import heads_of, tokens_of


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    return tokens_of(attend(kernel_map(q, kernel), kernel_map(k, kernel), v, mask, eps))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], eps: float) -> Tensor:
    """The equation on queries and keys after their feature map, by head: (B, heads, N, d) -> (B, heads, N, e)."""
    wide = accumulation_dtype(q)
    count = count_tokens(k, mask)
    key_mean = token_mean(k, mask, count)
    normaliser = (q @ key_mean.to(q.dtype).transpose(-1, -2)).to(wide) + padded_eps(eps, mask, wide)
    # padded values are zero, so padded keys do not matter
    if wide == q.dtype:
        state = (k.transpose(-1, -2) @ v.to(q.dtype)) / count
    else:
        state = (k * divisor(count)).to(q.dtype).transpose(-1, -2) @ (v * divisor(count)).to(q.dtype)
    return (q @ state / normaliser).to(v.dtype)
