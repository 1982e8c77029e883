# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from ..kernels import kernel_map
from ..masks import count_tokens, divisor, token_mean
from ..memory import heads_of, tokens_of


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    scale: float,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
) -> Tensor:
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    return tokens_of(attend(kernel_map(q, kernel), kernel_map(k, kernel), v, scale, mask))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Optional[Tensor]) -> Tensor:
    """The equation on queries and keys after their feature map, by head: (B, heads, N, d) -> (B, heads, N, e)."""
    count = count_tokens(k, mask)
    key_mean, value_mean = token_mean(k, mask, count), token_mean(v, mask, count)
    root = divisor(count)
    # centred before the product: the difference of two rounded products would lose what half precision has left.
    # Padded keys do not matter, their values are zero.
    covariance = ((k - key_mean) * root).to(q.dtype).transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return (q @ covariance + value_mean.to(q.dtype)).to(v.dtype)
