# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rank-augmented linear attention: linear attention with token weights and rotation."""

from functools import partial
from typing import Optional

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype, product_dtype, with_gradient
from .feature_maps import FEATURE_MAPS, IN_PLACE, LOWEST_EXPONENT, check_kernel, write_map
from .heads import copy_pair, dots, empty_pair, have_attention_shapes, scale_heads, split_heads
from .linear import equation, recomputed_equation
from .padding import count_tokens, padded_eps, token_mean
from .rotary import backwards, rotate
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
        mask (Tensor, optional): (B, N) bool, True for valid tokens.
        weight_scale (float, optional): Scale of the logits of the weights a: 1 in the paper, ``d ** -0.5`` in the
            release. None gives all tokens the same weight.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For an unknown ``kernel``, and if queries and keys differ in number.
    """
    check_kernel(kernel, FEATURE_MAPS)
    if is_known(q.shape[1], k.shape[1]) and q.shape[1] != k.shape[1]:
        raise ValueError(f'rala: q has {q.shape[1]} tokens and k {k.shape[1]}; allowed is one map, of queries and keys')
    with dispatch.without_autocast(q):
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=weight_scale, eps=eps)
        learns_rotary = rotary is not None and rotary.requires_grad
        fits = have_attention_shapes(q, k, v, num_heads) and q.shape == k.shape and q.dtype == k.dtype
        if learns_rotary or not fits:
            return equation(q, k, v, rotary, mask, **options)
        op = recomputed_equation if weight_scale is None else _attention
        return op(q, k, v, rotary, mask, **options)


# --- analytic gradient: feature maps are recomputed -------------------------------------------------------------------
#
# ``both`` (2, B, heads, N, d) queries and keys, ``g`` mean query, ``w`` token weights a / N, ``z`` mean weighted key,
# ``S`` state, ``d_x`` gradient of x.


def _forward(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps):
    """Return the output (B, N, heads * e), and g, 1 / normaliser, w, z and S for the backward pass."""
    wide, products = torch.promote_types(accumulation_dtype(q), v.dtype), product_dtype(q, v)
    both, v = copy_pair(q, k, num_heads, wide, partial(write_map, kernel)), split_heads(v, num_heads)
    q, k = both
    mean_query = token_mean(q, mask)
    logits = (k @ mean_query.transpose(-1, -2)).mul_(weight_scale)
    if mask is None and not dispatch.on_cpu(q):  # GPUs compute with denormal numbers as fast as with others
        weight = logits.softmax(dim=-2)
    else:
        weight = _token_weights(logits, mask)
    key_mean = weight.transpose(-1, -2) @ k
    inverse = (q @ key_mean.transpose(-1, -2)).add_(padded_eps(eps, mask, q.dtype)).reciprocal_()
    k.mul_(weight)
    if rotary is not None:
        both = rotate(both, rotary.to(q.dtype), inplace=True)
    q, k = both.to(products)
    state = k.transpose(-1, -2) @ v.to(products)
    numerator = (q @ state).transpose(1, 2)
    del both, q, k  # their memory is free for the result
    out = v.new_empty(numerator.shape)
    torch.mul(numerator, inverse.transpose(1, 2), out=out)
    return out.flatten(2), (mean_query, inverse, weight, key_mean, state)


def _token_weights(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Softmax over the valid tokens of logits (B, heads, N, 1), bounded below so that no weight is a denormal
    number."""
    # not minus infinity: for an image of padding alone, the weights and their gradients would be NaN
    lowest = torch.finfo(logits.dtype).min
    hidden = None if mask is None else ~mask[:, None, :, None]
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    logits = torch.maximum(logits, logits.amax(dim=-2, keepdim=True) + LOWEST_EXPONENT)
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    return logits.softmax(dim=-2)


def _backward(grads, inputs, kept, wanted, num_heads, kernel, weight_scale, eps):
    (q, k, v, rotary, mask), (mean_query, inverse, weight, key_mean, state) = inputs, kept
    wide, products = torch.promote_types(accumulation_dtype(q), v.dtype), product_dtype(q, v)
    made, places = empty_pair(q, num_heads)
    grad_v = torch.empty_like(v)
    both = copy_pair(q, k, num_heads, wide, partial(write_map, kernel))
    q, k = both
    v, state = split_heads(v, num_heads).to(products), state.to(products)
    table = None if rotary is None else rotary.to(wide)
    # out = n / m with the numerator n_i = R_i q_i S and the normaliser m_i = q_i . z + eps
    d_numerator = scale_heads(split_heads(grads[0], num_heads), inverse, products)
    turned = both if table is None else rotate(both, table)
    keys = turned[1] * weight if table is None else turned[1].mul_(weight)
    # S = sum_j w_j R_j k_j v_j^T
    d_state = (turned[0].to(products).transpose(-1, -2) @ d_numerator).to(products)
    split_heads(grad_v, num_heads).copy_(keys.to(products) @ d_state)
    del turned, keys
    inner = v.new_empty(2, *q.shape)
    torch.matmul(d_numerator, state.transpose(-1, -2), out=inner[0])
    torch.matmul(v, d_state.transpose(-1, -2), out=inner[1])
    inner = inner.to(wide)
    if table is not None:
        inner = rotate(inner, backwards(table), inplace=True)
    d_q, d_k = inner
    # n_i . d_n_i = q_i . (R_i^T S d_n_i): the numerator itself is not needed
    along = dots(both, inner)
    d_normaliser = along[0] * inverse  # times -1
    d_mean = d_normaliser.transpose(-1, -2) @ q  # times -1
    d_q.addcmul_(d_normaliser, key_mean, value=-1)
    # z = sum_j w_j k_j, w = softmax_j(k_j . g * weight_scale) and g = mean_i q_i
    d_weight = along[1] - dots(k, d_mean)
    d_k.sub_(d_mean).mul_(weight)
    d_logits = private_apis.SOFTMAX_BACKWARD(d_weight, weight, -2, weight.dtype)
    if mask is not None:
        d_logits.masked_fill_(~mask[:, None, :, None], 0)
    d_query = (d_logits.transpose(-1, -2) @ k) * (weight_scale / count_tokens(k, mask))
    d_k.addcmul_(d_logits, mean_query, value=weight_scale)
    d_q.add_(d_query if mask is None else d_query * mask[:, None, :, None])
    places.copy_(IN_PLACE[kernel][1](both, inner))
    return *made, grad_v, None, None


_attention = with_gradient(equation, _forward, _backward)
