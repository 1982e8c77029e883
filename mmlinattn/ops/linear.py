# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear attention with division, the base of rank-augmented linear attention."""

from collections.abc import Callable
from typing import Any, Optional, cast

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dtypes import accumulation_dtype, product_dtype
from .feature_maps import FEATURE_MAPS, IN_PLACE, LOWEST_EXPONENT, check_kernel
from .gradients import AnalyticGradient
from .heads import (
    Both,
    copy_pair,
    dots,
    empty_pair,
    merge_heads_5d,
    needs_equation,
    scale_heads,
    split_heads,
    split_heads_5d,
)
from .padding import count_tokens, inverse_sqrt, padded_eps, token_mean
from .rotary import backwards, rotate
from .sizes import is_known


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
        v (Tensor): Values, (B, M, E); zero for masked tokens.
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
        if needs_equation(q, k, v, num_heads):
            return linear_attention_reference(q, k, v, num_heads, kernel, mask, eps)
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=None, eps=eps)
        return _Linear.apply(options, q, k, v, None, mask)


def linear_attention_reference(q, k, v, num_heads, kernel, mask, eps) -> Tensor:
    q, k, v = (split_heads_5d(t, num_heads) for t in (q, k, v))
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
    return merge_heads_5d((q @ state / normaliser).to(v.dtype))


def _equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    return linear_attention_reference(q, k, v, num_heads, kernel, mask, eps)


def token_weights(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Softmax over the real tokens of logits (B, heads, N, 1), bounded below so that no weight is a denormal number."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    # not minus infinity: for an image of padding alone, the weights and their gradients would be NaN
    lowest = torch.finfo(logits.dtype).min
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    if is_known(logits.shape[-2]) and not logits.shape[-2]:
        return logits
    logits = torch.maximum(logits, logits.amax(dim=-2, keepdim=True) + LOWEST_EXPONENT)
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    return logits.softmax(dim=-2)


# --- analytic gradient of linear attention and RALA: feature maps are recomputed --------------------------------------
#
# ``g`` mean query, ``w`` token weights a / N, ``z`` mean weighted key, ``S`` state, ``d_x`` gradient of x. Without
# ``weight_scale`` (linear attention), g and w are None.


def forward(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps):
    """Return the output of linear attention or RALA, and [g, 1 / normaliser, w, z, S] for the backward pass."""
    wide = torch.promote_types(accumulation_dtype(q), v.dtype)
    both, values = copy_pair(q, k, num_heads, wide), split_heads(v, num_heads)
    out, *kept = mix(both, values, product_dtype(q, v), kernel, rotary, mask, weight_scale, eps)
    return out.to(v.dtype), kept


def mix(both: Both, v: Tensor, products: torch.dtype, kernel, rotary, mask, weight_scale, eps):
    """Compute linear attention or RALA on (B, heads, N, d) queries and keys ``both``, which are overwritten.

    Args:
        products (torch.dtype): Type of the matmuls with values and state; other tensors have the type of ``both``.

    Returns:
        tuple: Output (B, N, heads * e), g, 1 / normaliser, w, z, S.
    """
    each(IN_PLACE[kernel][0], both)
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
        both = each(lambda x: rotate(x, rotary.to(wide), inplace=True), both)
    q, k = each(lambda x: x.to(products), both)
    state = k.transpose(-1, -2) @ v.to(products)
    state = state / count if weight is None else state
    return (q @ state.to(products)).transpose(1, 2).flatten(2), mean_query, scales[0], weight, key_mean, state


def backward(grads, inputs, kept, wanted, num_heads, kernel, weight_scale, eps):
    """Return the gradients of q, k and v, and None for rotary table and mask. A name ``d_x`` is the gradient of x."""
    (q, k, v, rotary, mask), (mean_query, inverse, weight, key_mean, state) = inputs, kept
    wide, products = torch.promote_types(accumulation_dtype(q), v.dtype), product_dtype(q, v)
    made, places = empty_pair(q, k, num_heads)
    grad_v = torch.empty_like(v)
    both = each(IN_PLACE[kernel][0], copy_pair(q, k, num_heads, wide))
    q, k = both
    v, state = split_heads(v, num_heads).to(products), state.to(products)
    real = None if mask is None else mask[:, None, :, None].to(wide)
    count = count_tokens(k, mask)
    table = None if rotary is None else rotary.to(wide)
    # out = n / m with the numerator n_i = R_i q_i S and the normaliser m_i = q_i . z + eps
    d_numerator = scale_heads(split_heads(grads[0], num_heads), inverse, products)
    turned = both if table is None else each(lambda x: rotate(x, table), both)
    keys = turned[1] if weight is None else turned[1] * weight if table is None else turned[1].mul_(weight)
    d_state = turned[0].to(products).transpose(-1, -2) @ d_numerator
    # S = sum_j w_j R_j k_j v_j^T, or without weights mean_j R_j k_j v_j^T
    d_state = (d_state / count if weight is None else d_state).to(products)
    split_heads(grad_v, num_heads).copy_(keys.to(products) @ d_state)
    del turned, keys
    if isinstance(both, Tensor):
        inner: Both = v.new_empty(2, *q.shape)
        torch.matmul(d_numerator, state.transpose(-1, -2), out=inner[0])
        torch.matmul(v, d_state.transpose(-1, -2), out=inner[1])
    else:
        inner = d_numerator @ state.transpose(-1, -2), v @ d_state.transpose(-1, -2)
    inner = each(lambda x: x.to(wide), inner)
    if table is not None:
        back = backwards(table)
        inner = each(lambda x: rotate(x, back, inplace=True), inner)
    d_q, d_k = inner
    is_pair = isinstance(both, Tensor) and isinstance(inner, Tensor)
    # n_i . d_n_i = q_i . (R_i^T S d_n_i): the numerator itself is not needed
    along: Any = dots(cast(Tensor, both), cast(Tensor, inner)) if is_pair else (dots(q, d_q), None)
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
    if isinstance(both, Tensor) and isinstance(inner, Tensor) and isinstance(places, Tensor):
        places.copy_(undo_map(both, inner))
    else:
        places[0].copy_(undo_map(q, d_q)), places[1].copy_(undo_map(k, d_k))
    return *made, grad_v, None, None


def each(function, both: Both) -> Both:
    return function(both) if isinstance(both, Tensor) else (function(both[0]), function(both[1]))


def _mean(x: Tensor, mask: Optional[Tensor], count) -> Tensor:
    """Mean over the real tokens, (B, heads, N, d) -> (B, heads, 1, d)."""
    if mask is None:
        return x.mean(dim=2, keepdim=True)
    return ((x * mask[:, None, :, None].to(x.dtype)).sum(dim=2, keepdim=True) / count).to(x.dtype)


def with_gradient(of_equation: Callable) -> type[AnalyticGradient]:
    """Return the function of linear attention or RALA with the analytic gradient, for one of the two equations."""

    class Linear(AnalyticGradient):
        equation, gradient = staticmethod(of_equation), staticmethod(backward)

        @staticmethod
        def forward(ctx: Any, options, q, k, v, rotary, mask):
            ctx.op, ctx.options = Linear, options
            out, kept = forward(q, k, v, rotary, mask, **options)
            ctx.save_for_backward(q, k, v, rotary, mask, *kept)
            return out

    return Linear


_Linear = with_gradient(_equation)
