# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from torch import Tensor

from .. import forms
from ..memory import merge_heads, split_heads
from ..rotary import rotate
from . import reference


def masked_logit(dtype: torch.dtype) -> float:
    """What is added to hide a key: exp of it is 0 beside any real key. It is finite so that a row of hidden keys alone
    (all padding) stays so."""
    return torch.finfo(dtype).min / 4


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """Scaled dot-product attention, ``softmax(q k^T / sqrt(d) + bias) v``, by PyTorch's fused kernels; large maps on
    CPUs in blocks of rows.

    O(N M d) operations for each head in O(N + M) memory.

    Source: Vaswani et al. 2017, Eq. 1.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E).
        num_heads (int): Heads that the channels are split into.
        rotary (Tensor, optional): (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`; needs N = M.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        bias (Tensor, optional): Added to the logits, broadcastable to (B, heads, N, M), with four dimensions.

    Returns:
        Tensor: (B, N, E).
    """
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        hidden = hidden.masked_fill(~mask, masked_logit(q.dtype))[:, None, None, :]
        bias = hidden if bias is None else bias.to(q.dtype) + hidden
    if bias is not None:
        bias = bias.to(q.dtype)
    return merge_heads(forms.pick(reference, q, k, v).attend(q, k, v, bias))
