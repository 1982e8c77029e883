# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rank-augmented linear attention: linear attention with token weights and rotation."""

from typing import Optional

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dtypes import accumulation_dtype
from .feature_maps import FEATURE_MAPS, check_kernel
from .heads import Both, merge_heads_5d, needs_equation, split_heads, split_heads_5d, split_pair
from .linear import each, mix, token_weights, with_gradient
from .padding import count_tokens, inverse_sqrt, padded_eps
from .rotary import rotate_reference
from .sizes import is_known


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

    Args:
        q, k (Tensor): Queries and keys before their feature map, (B, N, num_heads * d).
        v (Tensor): Values, (B, N, E); zero for masked tokens.
        num_heads (int): Heads that the channels are split into.
        kernel (str): kappa, a name of :data:`~mmlinattn.ops.feature_maps.FEATURE_MAPS` with results >= 0: ``'elu'``,
            ``'relu'`` or ``'softmax'`` (RALA Tab. 10).
        rotary (Tensor, optional): R, (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`.
        mask (Tensor, optional): (B, N) bool, True for real tokens.
        weight_scale (float, optional): Scale of the logits of the weights a: 1 in the paper, ``d ** -0.5`` in the
            release. None gives all tokens the same weight.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``, and if queries and keys differ in number.
    """
    check_kernel(kernel, FEATURE_MAPS)
    if is_known(q.shape[1], k.shape[1]) and q.shape[1] != k.shape[1]:
        raise ValueError(f'rala: q has {q.shape[1]} tokens and k {k.shape[1]}; allowed is one map, of queries and keys')
    with dispatch.without_autocast(q):
        learns_rotary = rotary is not None and rotary.requires_grad
        fits = q.shape == k.shape and not learns_rotary
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=weight_scale, eps=eps)
        if not fits or needs_equation(q, k, v, num_heads, rotary):
            return _equation(q, k, v, rotary, mask, **options)
        return _RALA.apply(options, q, k, v, rotary, mask)


def _equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    dtype = v.dtype
    q, k, v = (split_heads_5d(t, num_heads) for t in (q, k, v))
    q, k = map(FEATURE_MAPS[kernel], (q, k))
    wide = accumulation_dtype(q)
    if q.dtype == torch.float16 and kernel == 'relu':  # a query that meets no key is divided by eps alone
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    count = count_tokens(k, mask)  # N, or (B, 1, 1, 1)
    real = None if mask is None else mask[:, None, :, None]  # (B, 1, N, 1)
    if weight_scale is not None:
        mean_query = (q if real is None else q * real).sum(dim=-2, keepdim=True, dtype=wide) / count
        logits = (k @ mean_query.to(k.dtype).transpose(-1, -2)).to(wide) * weight_scale  # (B, heads, N, 1)
        weight = token_weights(logits, mask)  # a / N
    else:
        weight = (torch.ones_like(k[:, :1, :1, :, :1]) if real is None else real).to(wide) / count
    key_mean = (k.transpose(-1, -2).to(wide) @ weight).to(q.dtype)  # mean_j(a_j k_j), (B, heads, d, 1)
    normaliser = (q @ key_mean).to(wide) + padded_eps(eps, mask, wide)
    q = (q / normaliser).to(q.dtype)  # a division of the result would keep one more tensor for the backward pass
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N underflows in float16; its square root on each factor does not
        k, v = (k * inverse_sqrt(count)).to(q.dtype), (v * (weight / inverse_sqrt(count))).to(q.dtype)
    if rotary is not None:
        q, k = rotate_reference(q, rotary), rotate_reference(k, rotary)
    return merge_heads_5d(q @ (k.transpose(-1, -2) @ v)).to(dtype)


def rala_in_place(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps=1e-6) -> Tensor:
    """Compute :func:`rala` on a CPU without gradients; ``q`` and ``k`` are overwritten and must not share memory."""
    # on CPUs without bfloat16 instructions, one conversion to float32 is cheaper than each operation in half precision
    native = q.dtype == v.dtype == torch.bfloat16 and private_apis.has_bfloat16_units()
    dtype = q.dtype if native else torch.promote_types(accumulation_dtype(q), v.dtype)
    pair = split_pair(q, k, num_heads)
    both: Both = (split_heads(q, num_heads), split_heads(k, num_heads)) if pair is None else pair
    both = each(lambda x: x.to(dtype), both)
    with dispatch.without_autocast(q):
        out, *_ = mix(both, split_heads(v, num_heads), dtype, kernel, rotary, mask, weight_scale, eps)
    return out.to(v.dtype)


_RALA = with_gradient(_equation)
