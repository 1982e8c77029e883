# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Linear attention with division, O(N d^2) for each head.

    ``out_i = phi(q_i) (1/N sum_j phi(k_j) v_j^T) / (phi(q_i) . mean_j(phi(k_j)) + eps)``.

    Source: Katharopoulos et al. 2020, Eq. 5; InLine Eq. 2; FLatten Eq. 4.

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        kernel (str): phi, a name of :data:`~mmlinattn.ops.kernels.KERNELS`; sums of its results must not vanish.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with forms.without_autocast(q):
        return forms.pick(reference, q, k, v).linear_attention(q, k, v, num_heads, kernel, mask, eps)
