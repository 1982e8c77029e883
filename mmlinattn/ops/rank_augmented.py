# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rank-augmented linear attention.

Names below: ``g`` mean query, ``w`` token weights a / N, ``z`` mean weighted key, ``S`` state, ``d_x`` gradient of x.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .dispatch import accumulation_dtype
from .feature_maps import LOWEST_EXPONENT, feature_map
from .rotary import rotate, rotate_reference
from .tensors import (
    blocks,
    count_tokens,
    divisor,
    first_order,
    gradients_like,
    heads_of,
    padded_eps,
    pair_by_head,
    product,
    product_by_token,
    scratch,
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

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

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
    """
    arguments = (q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
    with dispatch.without_autocast(q):
        backend = dispatch.backend(q, k, v, rotary)
        if backend != 'reference' and dispatch.has_kernel('rala', kernel, q, v, num_heads):
            from .triton import attention

            if attention.takes(q, k, v, num_heads, rotary, mask, same=True):
                return attention.attention(_equation, q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps)
        learns_rotary = dispatch.records() and rotary is not None and rotary.requires_grad
        if backend != 'cpu' or kernel not in _MAPS or q.numel() == 0 or learns_rotary:
            return rala_reference(*arguments)
        return _rala_on_cpu(*arguments)


def rala_reference(q, k, v, num_heads, kernel='elu', rotary=None, mask=None, weight_scale=1.0, eps=1e-6) -> Tensor:
    dtype = v.dtype
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    q, k = feature_map(q, kernel), feature_map(k, kernel)
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
        k, v = (k * divisor(count)).to(q.dtype), (v * (weight / divisor(count))).to(q.dtype)
    if rotary is not None:
        q, k = rotate_reference(q, rotary), rotate_reference(k, rotary)
    return tokens_of(q @ (k.transpose(-1, -2) @ v)).to(dtype)


def _equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    return rala_reference(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)


def token_weights(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Softmax over the real tokens of (B, heads, N, 1); none of the weights is a denormal number."""
    hidden = None if mask is None else ~mask[:, None, :, None]
    # not minus infinity: where all tokens are padding, the weights and their gradients would be NaN
    lowest = torch.finfo(logits.dtype).min
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    logits = torch.maximum(logits, logits.amax(dim=-2, keepdim=True) + LOWEST_EXPONENT)
    if hidden is not None:
        logits = logits.masked_fill(hidden, lowest)
    return logits.softmax(dim=-2)


# --- on CPUs: in place, in float32 or better (inference in bfloat16 where the CPU has units for it); the backward pass
# --- computes maps and weights once more ------------------------------------------------------------------------------


def _elu_plus_one_(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return F.elu_(x).add_(1)
    # the digits of exp(x), of which 1 + (exp(x) - 1) would keep those of 1 alone
    for images, rows in blocks(x.shape[0], x.shape[2], x.shape[1] * x.shape[3]):
        part = x[images, :, rows]
        exponential = part.clamp(LOWEST_EXPONENT, 0).exp_()
        part.clamp_(min=0).add_(exponential)
    return x


# The feature map in place, and the gradient of what was mapped from the mapped y and the gradient of y, in its place.
_MAPS = {
    'elu': (_elu_plus_one_, lambda y, d_y: d_y.mul_(y.clamp(max=1))),
    'relu': (F.relu_, lambda y, d_y: d_y.mul_(y > 0)),
    'softmax': (
        lambda x: x.copy_(feature_map(x.to(accumulation_dtype(x)), 'softmax')),
        lambda y, d_y: d_y.sub_(torch.linalg.vecdot(y, d_y).unsqueeze(-1)).mul_(y),
    ),
}


def _rala_on_cpu(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps) -> Tensor:
    wide, dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32), v.dtype
    rotary = None if rotary is None else rotary.to(wide)
    options = kernel, rotary, mask, weight_scale, eps
    if dispatch.records():
        q, k, v = (t.to(wide) for t in (q, k, v))
        return _RALA.apply(q, k, v, num_heads, *options).to(dtype)
    q, k = scratch(q, k, v)
    # without units for it, half precision is cheaper to widen once than to compute with, operation by operation
    works_in = dtype if q.dtype == dtype == torch.bfloat16 and private.has_bfloat16_units() else wide
    pair = pair_by_head(q, k, num_heads)
    if pair is None:
        q, k = (split_heads(t.to(works_in), num_heads) for t in (q, k))
    else:
        pair = pair.to(works_in)
        q, k = pair.chunk(2, dim=1)
    return _forward(q, k, pair, split_heads(v.to(works_in), num_heads), *options)[0].to(dtype)


def _forward(q, k, pair, v, kernel, rotary, mask, weight_scale, eps):
    """The result (B, N, heads * e) and g, w, z, S of (B, heads, N, d) tensors; overwrites ``q`` and ``k``. ``pair`` is
    both in one, or None, see :func:`~mmlinattn.ops.tensors.pair_by_head`."""
    _map(q, k, pair, kernel)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    real = None if mask is None else mask[:, None, :, None].to(dtype)  # (B, 1, N, 1)
    count = count_tokens(k, mask)
    mean_query = (q if real is None else q * real).sum(dim=2, keepdim=True) / count
    if weight_scale is None:
        weight = (q.new_ones(1, 1, q.shape[2], 1) if real is None else real).to(wide) / count
    else:
        logits = product(k, mean_query.to(dtype).transpose(-1, -2)).to(wide)
        weight = token_weights(logits.mul_(weight_scale), mask)
    weight_row = weight.to(dtype).transpose(-1, -2)
    key_mean = product(weight_row.expand(*k.shape[:2], -1, -1), k)
    normaliser = product(q, key_mean.transpose(-1, -2)).to(wide) + padded_eps(eps, mask, wide)
    factors = normaliser.reciprocal_().to(dtype), weight.to(dtype)
    if pair is None:
        q, k = (x.mul_(factor) for x, factor in zip((q, k), factors))
    else:
        q, k = pair.mul_(torch.cat([factor.expand(*q.shape[:3], 1) for factor in factors], dim=1)).chunk(2, dim=1)
    if rotary is not None and pair is not None:
        q, k = rotate(pair, rotary, inplace=True).chunk(2, dim=1)
    elif rotary is not None:
        q, k = rotate(q, rotary, inplace=True), rotate(k, rotary, inplace=True)
    state = product(k.transpose(-1, -2), v)
    return product_by_token(q, state), mean_query, weight, key_mean, state


def _map(q, k, pair, kernel) -> None:
    """The feature map of both, in place."""
    for x in (q, k) if pair is None else (pair,):
        _MAPS[kernel][0](x)


def _copies(q, k, num_heads):
    """Queries and keys (B, N, heads * d) in new memory by head, and both in one where they lay so."""
    pair = pair_by_head(q, k, num_heads)
    if pair is None:
        return *(split_heads(t.clone(memory_format=torch.contiguous_format), num_heads) for t in (q, k)), None
    pair = pair.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return *pair.chunk(2, dim=1), pair


class _RALA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps):
        queries, keys, pair = _copies(q, k, num_heads)
        values = split_heads(v, num_heads)
        out, *state = _forward(queries, keys, pair, values, kernel, rotary, mask, weight_scale, eps)
        ctx.save_for_backward(q, k, v, rotary, mask, *state)
        ctx.options = num_heads, kernel, weight_scale, eps
        return out

    @first_order
    def backward(ctx: Any, grad):
        q, k, v, rotary, mask, mean_query, weight, key_mean, state = ctx.saved_tensors
        num_heads, kernel, weight_scale, eps = ctx.options
        undo_map = _MAPS[kernel][1]
        grads = gradients_like(q, k, v)
        d_q, d_k, d_v = (split_heads(t, num_heads) for t in grads)
        q, k, pair = _copies(q, k, num_heads)
        _map(q, k, pair, kernel)
        v, grad = split_heads(v, num_heads), split_heads(grad, num_heads)
        real = None if mask is None else mask[:, None, :, None].to(q.dtype)
        count, eps = count_tokens(k, mask), padded_eps(eps, mask, q.dtype)
        back = None if rotary is None else torch.view_as_real(torch.view_as_complex(rotary).conj_physical())

        def turned(x, table, inplace):
            return x if table is None else rotate(x, table, inplace)

        # out = n / m with the numerator n_i = R_i q_i S and the normaliser m_i = q_i . z + eps
        normaliser = torch.linalg.vecdot(q, key_mean).unsqueeze(-1) + eps
        d_numerator = grad / normaliser
        inner = turned(product(d_numerator, state.transpose(-1, -2)), back, True)
        # n_i . d_n_i = q_i . (R_i^T S d_n_i): the numerator itself is not needed
        d_normaliser = -torch.linalg.vecdot(q, inner).unsqueeze(-1) / normaliser
        d_mean = product(d_normaliser.transpose(-1, -2), q)
        torch.addcmul(inner, d_normaliser, key_mean, out=d_q)
        d_state = product(turned(q, rotary, False).transpose(-1, -2), d_numerator)
        # S = sum_j w_j R_j k_j v_j^T and z = sum_j w_j k_j
        inner = turned(product(v, d_state.transpose(-1, -2)), back, True).add_(d_mean)
        torch.mul(inner, weight, out=d_k)
        d_v.copy_(product(turned(k * weight, rotary, True), d_state))
        # w = softmax_j(k_j . g * weight_scale) and g = mean_i q_i
        if weight_scale is not None:
            d_weight = torch.linalg.vecdot(k, inner).unsqueeze(-1)
            d_logits = weight * (d_weight - (weight * d_weight).sum(dim=2, keepdim=True)) * weight_scale
            if mask is not None:
                d_logits = d_logits.masked_fill_(~mask[:, None, :, None], 0)
            d_query = product(d_logits.transpose(-1, -2), k) / count
            d_k.addcmul_(d_logits, mean_query)
            d_q.add_(d_query if real is None else d_query * real)
        d_pair = None if pair is None else pair_by_head(grads[0], grads[1], num_heads)
        if d_pair is None:
            undo_map(k, d_k)
            undo_map(q, d_q)
        else:
            undo_map(pair, d_pair)
        return *grads, *(None,) * 6
