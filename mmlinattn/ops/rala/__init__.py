# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


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
    """Rank-augmented linear attention (RALA Eq. 2-4), O(N d^2) for each head.

    With the feature map kappa, ``q = kappa(q)`` and ``k = kappa(k)``: the context-aware weights
    ``a = N softmax_tokens(mean(q) k^T * weight_scale)`` multiply the keys (Eq. 3, 4); then
    ``out_i = R_i q_i (1/N sum_j a_j R_j k_j v_j^T) / (q_i . mean_j(a_j k_j) + eps)``. The rotary encoding R enters the
    numerator only.

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

    Args:
        q, k (Tensor): Queries and keys before their feature map, (B, N, num_heads * d).
        v (Tensor): Values, (B, N, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        kernel (str): kappa, a name of :data:`~mmlinattn.ops.kernels.KERNELS` with results >= 0: ``'elu'``,
            ``'relu'`` or ``'softmax'`` (RALA Tab. 10).
        rotary (Tensor, optional): R, (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`.
        mask (Tensor, optional): (B, N) bool, True for real tokens.
        weight_scale (float, optional): Scale of the weights' logits (1 in the paper, ``d ** -0.5`` in the release);
            None weighs all tokens alike.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with forms.without_autocast(q):
        out = forms.pick(reference, q, k, v).rala(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
        return out if out.dtype == v.dtype else out.to(v.dtype)
