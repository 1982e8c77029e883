# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype, with_gradient
from .linear import exponentials
from .tokens import merge_heads_5d, root_weights, split_heads_5d


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Optional[Tensor] = None) -> Tensor:
    """Efficient attention, O(N d^2) for each head.

    ``out = softmax_channels(q) (softmax_tokens(k)^T v)``: each channel of the keys is a map over the tokens, and each
    query is a mixture of these maps.

    Source: Efficient Attention (Shen et al. 2021), Eq. 4-6.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero for masked tokens.
        num_heads (int): Heads that the channels are split into.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with dispatch.without_autocast(q):
        return _attention(q, k, v, mask, num_heads=num_heads)


def _equation(q, k, v, mask, num_heads) -> Tensor:
    wide = accumulation_dtype(q)
    q, k, v = split_heads_5d(q, num_heads), split_heads_5d(k, num_heads).to(wide), split_heads_5d(v, num_heads)
    k, root = exponentials(k, mask).transpose(-1, -2), root_weights(k, None)
    k = k / (k @ root).clamp(min=1e-6)  # the sum of exponentials is 0 for padding alone
    state = k @ (v.to(wide) * root)
    # the state is a weighted mean of values, so half precision can hold it
    return merge_heads_5d(q.softmax(dim=-1, dtype=wide).to(v.dtype) @ state.to(v.dtype))


_attention = with_gradient(_equation)
