# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rank-augmented linear attention.

Names below: ``g`` mean query, ``w`` token weights a / N, ``z`` mean weighted key, ``S`` state, ``d_x`` gradient of x.
"""

from typing import Optional

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype
from .feature_maps import FEATURE_MAPS, IN_PLACE, LOWEST_EXPONENT, check_kernel
from .gradients import GradientRule, apply_rule
from .rotary import backwards, rotate, rotate_reference
from .tensors import (
    Both,
    are_attended,
    copies_by_head,
    count_tokens,
    dots,
    gradients_by_head,
    heads_of,
    inverse_sqrt,
    is_known,
    multiply_by_head,
    padded_eps,
    pair_by_head,
    product_dtype,
    split_heads,
    tokens_of,
)


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
        v (Tensor): Values, (B, N, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        kernel (str): kappa, a name of :data:`~mmlinattn.ops.feature_maps.FEATURE_MAPS` with results >= 0: ``'elu'``,
            ``'relu'`` or ``'softmax'`` (RALA Tab. 10).
        rotary (Tensor, optional): R, (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`.
        mask (Tensor, optional): (B, N) bool, True for real tokens.
        weight_scale (float, optional): Scale of the weights' logits (1 in the paper, ``d ** -0.5`` in the release);
            None weighs all tokens alike.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``, and for keys of other tokens than queries.
    """
    check_kernel(kernel, FEATURE_MAPS)
    if is_known(q.shape[1], k.shape[1]) and q.shape[1] != k.shape[1]:
        raise ValueError(f'rala: q has {q.shape[1]} tokens and k {k.shape[1]}; allowed is one map, of queries and keys')
    with dispatch.without_autocast(q):
        learns_rotary = rotary is not None and rotary.requires_grad
        fits = are_attended(q, k, v, num_heads) and q.shape == k.shape and not learns_rotary
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=weight_scale, eps=eps)
        if dispatch.backend(q, k, v, rotary) == 'reference' or not fits:
            return _equation(q, k, v, rotary, mask, **options)
        return apply_rule(_RALA, options, q, k, v, rotary, mask)


def _equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    dtype = v.dtype
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
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
    q = (q / normaliser).to(q.dtype)  # dividing the result instead would keep one map more for the backward pass
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N leaves the range of float16; its root on each factor does not
        k, v = (k * inverse_sqrt(count)).to(q.dtype), (v * (weight / inverse_sqrt(count))).to(q.dtype)
    if rotary is not None:
        q, k = rotate_reference(q, rotary), rotate_reference(k, rotary)
    return tokens_of(q @ (k.transpose(-1, -2) @ v)).to(dtype)


def token_weights(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Softmax over the real tokens of (B, heads, N, 1); none of the weights is a denormal number."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    # not minus infinity: with padding alone, the weights and their gradients would be NaN
    lowest = torch.finfo(logits.dtype).min
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    if is_known(logits.shape[-2]) and not logits.shape[-2]:
        return logits
    logits = torch.maximum(logits, logits.amax(dim=-2, keepdim=True) + LOWEST_EXPONENT)
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    return logits.softmax(dim=-2)


# --- by hand: maps and weights are computed once more in the backward pass --------------------------------------------


def forward(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps):
    """Return the result, and g, 1 / m, w, z, S. Without ``weight_scale`` (linear attention too), g and w are None."""
    wide = torch.promote_types(accumulation_dtype(q), v.dtype)
    both, values = copies_by_head(q, k, num_heads, wide), split_heads(v, num_heads)
    out, *kept = _mix(both, values, product_dtype(q, v), kernel, rotary, mask, weight_scale, eps)
    return out.to(v.dtype), kept


def rala_in_place(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps=1e-6) -> Tensor:
    """:func:`rala` on a CPU without gradients, in place: ``q`` and ``k`` share no memory and are overwritten."""
    # without units for it, half precision is cheaper to widen once than to compute with, operation by operation
    native = q.dtype == v.dtype == torch.bfloat16 and private_apis.has_bfloat16_units()
    dtype = q.dtype if native else torch.promote_types(accumulation_dtype(q), v.dtype)
    pair = pair_by_head(q, k, num_heads)
    both: Both = (split_heads(q, num_heads), split_heads(k, num_heads)) if pair is None else pair
    both = _each(lambda x: x.to(dtype), both)
    with dispatch.without_autocast(q):
        out, *_ = _mix(both, split_heads(v, num_heads), dtype, kernel, rotary, mask, weight_scale, eps)
    return out.to(v.dtype)


def _mix(both: Both, v: Tensor, products: torch.dtype, kernel, rotary, mask, weight_scale, eps):
    """Return the result (B, N, heads * e) and g, 1 / m, w, z, S of (B, heads, N, d) tensors; overwrites ``both``.

    Args:
        products (torch.dtype): Of the products with values and state. The rest is of the type of ``both``.
    """
    _each(IN_PLACE[kernel][0], both)
    q, k = both
    dtype, wide = q.dtype, accumulation_dtype(q)
    count, floor = count_tokens(k, mask), padded_eps(eps, mask, wide)
    mean_query, scales = None, q.new_empty(1 if weight_scale is None else 2, *q.shape[:-1], 1, dtype=wide)
    weight = None if weight_scale is None else scales[1]
    if weight is None:
        key_mean = _mean(k, mask, count)
    else:
        mean_query = _mean(q, mask, count)
        logits = (k @ mean_query.transpose(-1, -2)).to(wide).mul_(weight_scale)
        if mask is None and not dispatch.on_cpu(q):  # GPUs compute with denormal numbers as fast as with others
            torch.softmax(logits, dim=-2, out=weight)
        else:
            weight.copy_(token_weights(logits, mask))
        key_mean = weight.to(dtype).transpose(-1, -2) @ k
    torch.reciprocal((q @ key_mean.transpose(-1, -2)).to(wide).add_(floor), out=scales[0])
    if weight is None:
        q.mul_(scales[0].to(dtype))
    elif isinstance(both, Tensor):
        both.mul_(scales.to(dtype))
    else:
        both = q.mul_(scales[0].to(dtype)), k.mul_(weight.to(dtype))
    if rotary is not None:
        both = _each(lambda x: rotate(x, rotary.to(wide), inplace=True), both)
    q, k = _each(lambda x: x.to(products), both)
    state = k.transpose(-1, -2) @ v.to(products)
    state = state / count if weight is None else state
    return (q @ state.to(products)).transpose(1, 2).flatten(2), mean_query, scales[0], weight, key_mean, state


def backward(grads, inputs, kept, wanted, num_heads, kernel, weight_scale, eps):
    """Return the gradients of the inputs; ``d_x`` is that of x."""
    (q, k, v, rotary, mask), (mean_query, inverse, weight, key_mean, state) = inputs, kept
    wide, products = torch.promote_types(accumulation_dtype(q), v.dtype), product_dtype(q, v)
    made, places = gradients_by_head(q, k, num_heads)
    grad_v = torch.empty_like(v)
    both = _each(IN_PLACE[kernel][0], copies_by_head(q, k, num_heads, wide))
    q, k = both
    v, state = split_heads(v, num_heads).to(products), state.to(products)
    real = None if mask is None else mask[:, None, :, None].to(wide)
    count = count_tokens(k, mask)
    table = None if rotary is None else rotary.to(wide)
    # out = n / m with the numerator n_i = R_i q_i S and the normaliser m_i = q_i . z + eps
    d_numerator = multiply_by_head(split_heads(grads[0], num_heads), inverse, products)
    turned = both if table is None else _each(lambda x: rotate(x, table), both)
    keys = turned[1] if weight is None else turned[1] * weight if table is None else turned[1].mul_(weight)
    d_state = turned[0].to(products).transpose(-1, -2) @ d_numerator
    # S = sum_j w_j R_j k_j v_j^T, or without weights their mean
    d_state = (d_state / count if weight is None else d_state).to(products)
    split_heads(grad_v, num_heads).copy_(keys.to(products) @ d_state)
    del turned, keys
    if isinstance(both, Tensor):
        inner: Both = v.new_empty(2, *q.shape)
        torch.matmul(d_numerator, state.transpose(-1, -2), out=inner[0])
        torch.matmul(v, d_state.transpose(-1, -2), out=inner[1])
    else:
        inner = d_numerator @ state.transpose(-1, -2), v @ d_state.transpose(-1, -2)
    inner = _each(lambda x: x.to(wide), inner)
    if table is not None:
        back = backwards(table)
        inner = _each(lambda x: rotate(x, back, inplace=True), inner)
    d_q, d_k = inner
    # n_i . d_n_i = q_i . (R_i^T S d_n_i): the numerator itself is not needed
    along = dots(both, inner) if isinstance(both, Tensor) else (dots(q, d_q), None)
    d_normaliser = along[0] * inverse  # times -1
    d_mean = d_normaliser.transpose(-1, -2) @ q  # times -1
    d_q.addcmul_(d_normaliser, key_mean, value=-1)
    # z = sum_j w_j k_j, or the mean key
    if weight is None:
        d_mean = d_mean / count
        d_k.sub_(d_mean if real is None else d_mean * real)
    else:
        # w = softmax_j(k_j . g * weight_scale) and g = mean_i q_i
        d_weight = (dots(k, d_k) if along[1] is None else along[1]) - dots(k, d_mean)
        d_k.sub_(d_mean).mul_(weight)
        d_logits = private_apis.SOFTMAX_BACKWARD(d_weight, weight, -2, weight.dtype)
        d_logits = d_logits if mask is None else d_logits.masked_fill_(~mask[:, None, :, None], 0)
        d_query = (d_logits.transpose(-1, -2) @ k) * (weight_scale / count)
        d_k.addcmul_(d_logits, mean_query, value=weight_scale)
        d_q.add_(d_query if real is None else d_query * real)
    undo_map = IN_PLACE[kernel][1]
    if isinstance(both, Tensor) and isinstance(places, Tensor):
        places.copy_(undo_map(both, inner))
    else:
        places[0].copy_(undo_map(q, d_q)), places[1].copy_(undo_map(k, d_k))
    return *made, grad_v, None, None


def _each(function, both: Both) -> Both:
    return function(both) if isinstance(both, Tensor) else (function(both[0]), function(both[1]))


def _mean(x: Tensor, mask: Optional[Tensor], count) -> Tensor:
    """Over the real tokens."""
    if mask is None:
        return x.mean(dim=2, keepdim=True)
    return ((x * mask[:, None, :, None].to(x.dtype)).sum(dim=2, keepdim=True) / count).to(x.dtype)


_RALA = GradientRule(_equation, forward, backward)
