# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from torch import Tensor

from . import dispatch, rank_augmented
from .dispatch import accumulation_dtype
from .feature_maps import FEATURE_MAPS, check_kernel
from .gradients import GradientRule, apply_rule
from .tensors import are_attended, count_tokens, heads_of, inverse_sqrt, padded_eps, token_mean, tokens_of


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

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        kernel (str): phi, a name of :data:`~mmlinattn.ops.feature_maps.FEATURE_MAPS`; sums of its results must not
            vanish.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``.
    """
    check_kernel(kernel, FEATURE_MAPS)
    with dispatch.without_autocast(q):
        if dispatch.backend(q, k, v) == 'reference' or not are_attended(q, k, v, num_heads):
            return linear_attention_reference(q, k, v, num_heads, kernel, mask, eps)
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=None, eps=eps)
        return apply_rule(_RULE, options, q, k, v, None, mask)


def linear_attention_reference(q, k, v, num_heads, kernel, mask, eps) -> Tensor:
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    q, k = map(FEATURE_MAPS[kernel], (q, k))
    wide = accumulation_dtype(q)
    if q.dtype == torch.float16:  # gradients divided by a normaliser near eps would leave its range
        q, k = q.to(wide), k.to(wide)
    count = count_tokens(k, mask)
    key_mean = token_mean(k, mask, count)
    normaliser = (q @ key_mean.to(q.dtype).transpose(-1, -2)).to(wide) + padded_eps(eps, mask, wide)
    # padded values are zero, so padded keys do not matter
    if wide == q.dtype:
        state = (k.transpose(-1, -2) @ v.to(q.dtype)) / count
    else:
        state = (k * inverse_sqrt(count)).to(q.dtype).transpose(-1, -2) @ (v * inverse_sqrt(count)).to(q.dtype)
    return tokens_of((q @ state / normaliser).to(v.dtype))


def _equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    return linear_attention_reference(q, k, v, num_heads, kernel, mask, eps)


# RALA without token weights and rotation
_RULE = GradientRule(_equation, rank_augmented.forward, rank_augmented.backward)
