# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    scale: float,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
) -> Tensor:
    """Injective linear attention (InLine Eq. 3-5), O(N d^2) for each head.

    The weights ``(scale q_i . (k_j - mean(k)) + 1) / N`` of mapped queries and keys sum to 1 without a division, so
    ``out_i = mean(v) + scale q_i cov(k, v)``: one small state, one pass over the queries.

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

    Args:
        q (Tensor): Queries before their feature map, (B, N, num_heads * d).
        k (Tensor): Keys before their feature map, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        scale (float): ``d ** -0.5`` in the release.
        kernel (str): The feature map, a name of :data:`~mmlinattn.ops.kernels.KERNELS`.
        mask (Tensor, optional): (B, M) bool, True for real tokens.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with forms.without_autocast(q):
        return forms.pick(reference, q, k, v).inline_attention(q, k, v, num_heads, scale, kernel, mask)
