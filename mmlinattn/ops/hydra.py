# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .dispatch import accumulation_dtype, with_gradient
from .linear import unit
from .tokens import root_weights


def hydra_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """Attention with as many heads as channels, O(N C).

    ``out_i = phi(q_i) * sum_j phi(k_j) * v_j`` with element-wise products, and ``phi(x) = x / |x|`` over all channels.

    Source: Hydra Attention (Bolya et al. 2022), Eq. 5-7.

    Args:
        q (Tensor): Queries, (B, N, C).
        k (Tensor): Keys, (B, M, C).
        v (Tensor): Values, (B, M, C); zero for masked tokens.
        mask (Tensor, optional): (B, M) bool. Not used: zero values are enough, since nothing is divided by a sum over
            tokens.

    Returns:
        Tensor: (B, N, C), in the dtype of ``v``.
    """
    return _attention(q, k, v)


def _equation(q, k, v) -> Tensor:
    wide, root = accumulation_dtype(q), root_weights(k, None)
    state = (unit(k.to(wide)) * (v * root)).sum(dim=1, keepdim=True)  # (B, 1, C), divided by sqrt(N)
    return (unit(q.to(wide)) * state * root.sum(dim=1, keepdim=True)).to(v.dtype)


_attention = with_gradient(_equation)
