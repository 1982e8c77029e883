# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Optional[Tensor] = None) -> Tensor:
    """Efficient attention, O(N d^2) for each head.

    ``out = softmax_channels(q) (softmax_tokens(k)^T v)``: each channel of the keys is a map over the tokens, each
    query a mixture of these maps.

    Source: Efficient Attention (Shen et al. 2021), Eq. 4-6.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        mask (Tensor, optional): (B, M) bool, True for real tokens.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with forms.without_autocast(q):
        return forms.pick(reference, q, k, v).efficient_attention(q, k, v, num_heads, mask)
