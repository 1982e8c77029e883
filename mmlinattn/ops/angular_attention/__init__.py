# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def angular_attention(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Optional[Tensor] = None, released: bool = True
) -> Tensor:
    """Linear angular attention: the angle between query and key, to first order, O(N d^2) for each head.

    With q and k divided by their norms within the head,

    - released layer: ``x_i = v_i / 2 + q_i (sum_j k_j v_j^T) / pi``, ``out_i = x_i / |x_i|`` within the head;
    - paper: weights ``1/2 + q_i . k_j / pi``, divided by their sum over the keys, which is positive.

    Source: Castling-ViT (You et al. 2023), Eq. 4-6, and its released code.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        released (bool): The released layer, which needs N = M; False is the paper's form.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For ``released`` with other keys than queries.
    """
    if released and q.shape[1] != k.shape[1]:
        raise ValueError(
            f'released=True adds the value of each query: it needs as many keys as queries ({q.shape[1]}), not '
            f'{k.shape[1]}; released=False takes any'
        )
    with forms.without_autocast(q):
        return forms.pick(reference, q, k, v).angular_attention(q, k, v, num_heads, mask, released)
