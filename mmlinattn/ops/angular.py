# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import math
from typing import Optional

from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype, with_gradient
from .linear import unit
from .tokens import merge_heads_5d, root_weights, split_heads_5d


def angular_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    mask: Optional[Tensor] = None,
    released: bool = True,
    unit_output: bool = True,
) -> Tensor:
    """Linear angular attention: a first-order expansion of the angle between query and key, O(N d^2) for each head.

    With q and k divided by their norms within the head,

    - released layer: ``x_i = v_i / 2 + q_i (sum_j k_j v_j^T) / pi``, ``out_i = x_i / |x_i|`` within the head;
    - paper: weights ``1/2 + q_i . k_j / pi``, divided by their sum over the keys, which is positive.

    Source: Castling-ViT (You et al. 2023), Eq. 4-6, and its released code.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero for masked tokens.
        num_heads (int): Heads that the channels are split into.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.
        released (bool): Compute the released layer, which needs N = M; False computes the paper's form.
        unit_output (bool): False returns ``x`` of the released layer without the division by its norm.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: If ``released`` and the numbers of queries and keys differ.
    """
    if released and q.shape[1] != k.shape[1]:
        raise ValueError(
            f'released=True adds the value of each query: it needs as many keys as queries ({q.shape[1]}), not '
            f'{k.shape[1]}; released=False takes any'
        )
    with dispatch.without_autocast(q):
        return _attention(q, k, v, mask, num_heads=num_heads, released=released, unit_output=unit_output)


def _equation(q, k, v, mask, num_heads, released, unit_output) -> Tensor:
    """Compute :func:`angular_attention` in operations that autograd records."""
    wide, dtype = accumulation_dtype(q), v.dtype
    q, k, v = (split_heads_5d(t.to(wide), num_heads) for t in (q, k, v))
    q, k = unit(q), unit(k)
    if released:
        root = root_weights(k, None)  # 1 / sqrt(N)
        v = v * root
        out = v / 2 + q @ (k.transpose(-1, -2) @ v) / math.pi
        return merge_heads_5d((unit(out) if unit_output else out / root).to(dtype))
    root = root_weights(k, mask)
    keys, v = (k * root).transpose(-1, -2), v * root
    numerator = root.transpose(-1, -2) @ v / 2 + q @ (keys @ v) / math.pi
    return merge_heads_5d((numerator / (0.5 + q @ (keys @ root) / math.pi)).to(dtype))


_attention = with_gradient(_equation)
