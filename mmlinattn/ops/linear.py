# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear attention, rank-augmented linear attention, their common equation, and feature maps of queries and keys."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype, product_dtype, with_gradient
from .rotary import backwards, rotate, rotate_reference
from .tokens import (
    blocks,
    copy_pair,
    count_tokens,
    dots,
    empty_pair,
    have_attention_shapes,
    is_known,
    merge_heads_5d,
    padded_eps,
    root_weights,
    scale_heads,
    split_heads,
    split_heads_5d,
    token_mean,
)

# Lower bound of exponents. Its exp, 1e-13, vanishes beside 1 in float32, and its products with itself and gradients are
# not denormal: many CPUs compute with denormal numbers a hundred times more slowly.
LOWEST_EXPONENT = -30.0


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
        kernel (str): phi, a name of :data:`~mmlinattn.ops.linear.FEATURE_MAPS`; sums of its results must not
            vanish.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``.
    """
    check_kernel(kernel, FEATURE_MAPS)
    with dispatch.without_autocast(q):
        options = dict(num_heads=num_heads, kernel=kernel, weight_scale=None, eps=eps)
        op = recomputed_equation if have_attention_shapes(q, k, v, num_heads) else equation
        return op(q, k, v, None, mask, **options)


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
        kernel (str): kappa, a name of :data:`~mmlinattn.ops.linear.FEATURE_MAPS` with results >= 0: ``'elu'``,
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


def equation(q, k, v, rotary, mask, num_heads, kernel, weight_scale, eps) -> Tensor:
    """Compute :func:`~mmlinattn.ops.rala`; with ``rotary`` and ``weight_scale`` None, it is linear attention.

    In float16 logits would be off by several per cent, and gradients divided by a normaliser near eps would overflow.
    So half precision is computed in float32, but for the products of bfloat16 with values and state.
    """
    dtype, wide = v.dtype, accumulation_dtype(q)
    products = q.dtype if q.dtype == dtype == torch.bfloat16 else torch.promote_types(wide, dtype)
    q, k, v = (split_heads_5d(t, num_heads) for t in (q, k, v))
    q, k = (FEATURE_MAPS[kernel](t.to(wide)) for t in (q, k))
    if weight_scale is None:
        root = root_weights(k, mask)
    else:
        root = _root_softmax(k @ token_mean(q, mask).transpose(-1, -2) * weight_scale, mask)
    k, v = k * root, v * root
    normaliser = q @ (k.transpose(-1, -2) @ root) + padded_eps(eps, mask, wide)
    if rotary is not None:
        q, k = rotate_reference(q, rotary), rotate_reference(k, rotary)
    state = k.to(products).transpose(-1, -2) @ v.to(products)
    return merge_heads_5d(q.to(products) @ state / normaliser).to(dtype)


def exponentials(logits: Tensor, mask: Optional[Tensor], lowest: float = LOWEST_EXPONENT) -> Tensor:
    """Return ``exp(logits - their maximum)`` over the tokens of (..., B, heads, N, d): at most 1, at least
    ``exp(lowest)``, and 0 for padding."""
    if is_known(logits.shape[-2]) and not logits.shape[-2]:
        return logits
    if mask is None:
        return (logits - logits.amax(dim=-2, keepdim=True).detach()).clamp(min=lowest).exp()
    real = mask[:, None, :, None]
    # not minus infinity: for an image of padding alone, results and their gradients would be NaN
    largest = logits.detach().masked_fill(~real, torch.finfo(logits.dtype).min).amax(dim=-2, keepdim=True)
    return (logits - largest).masked_fill(~real, 0.0).clamp(min=lowest).exp() * real


def _root_softmax(logits: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return the square root of the softmax over the tokens of logits (..., B, heads, N, 1), see
    :func:`~mmlinattn.ops.tokens.root_weights`."""
    root = exponentials(logits / 2, mask, LOWEST_EXPONENT / 2) / 16
    return root / (root.transpose(-1, -2) @ root).clamp(min=1 / 512).sqrt()


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
    del logits
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
    """Return the gradients of the inputs; for the arguments see :func:`.dispatch.function_of`."""
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
recomputed_equation = with_gradient(equation)

# --- feature maps -----------------------------------------------------------------------------------------------------


def _elu_plus_one(x: Tensor) -> Tensor:
    # Not F.elu: compiled, its gradient has other strides than its shape function reports. Not torch.where, the slowest
    # node of ONNX graphs. Not clamp(max=0), which has no gradient at its bound.
    positive = F.relu(x)
    return (x - positive).clamp(min=LOWEST_EXPONENT).exp() + positive


def _softmax(x: Tensor) -> Tensor:
    return (x - x.amax(dim=-1, keepdim=True)).clamp(min=LOWEST_EXPONENT).softmax(dim=-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    'identity': lambda x: x,
    'relu': F.relu,
    'leakyrelu': F.leaky_relu,
    'elu': _elu_plus_one,  # ELU + 1; Katharopoulos et al. 2020, Eq. 7; RALA
    'exp': lambda x: torch.exp(0.2 * x),  # InLine's release
    'softmax': _softmax,  # over the channels of a head
}


def _elu_plus_one_(x: Tensor) -> Tensor:
    # the gradient of ELU multiplies by exp(x) below 0, and by 1 above
    return private_apis.ELU_BACKWARD(x.clamp(min=0).add_(1), 1, 1, 1, False, x, grad_input=x)


def _write_elu_plus_one(out: Tensor, x: Tensor) -> Tensor:
    # not 1 + elu(x): the sum with 1 would round off the digits of small results
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :].to(out.dtype)
        exponential = part.clamp(LOWEST_EXPONENT, 0).exp_()
        torch.clamp(part, min=0, out=out[..., images, :, rows, :]).add_(exponential)
        del part, exponential  # before those of the next block are allocated
    return out


def _softmax_(x: Tensor) -> Tensor:
    return x.copy_(_softmax(x.to(torch.promote_types(x.dtype, torch.float32))))


# For each name: the feature map of (..., B, heads, N, d), in place, and its backward function (y, d_y) -> d_x. The
# latter takes the output y and overwrites its gradient d_y. Ops call write_map, which has another 'elu' for CPUs.
IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    'identity': (lambda x: x, lambda y, d_y: d_y),
    'relu': (F.relu_, lambda y, d_y: private_apis.RELU_BACKWARD(d_y, y, 0, grad_input=d_y)),
    'leakyrelu': (F.leaky_relu_, lambda y, d_y: d_y.copy_(torch.where(y > 0, d_y, d_y * 0.01))),
    'elu': (_elu_plus_one_, lambda y, d_y: d_y.mul_(y.clamp(max=1))),
    'exp': (lambda x: x.mul_(0.2).exp_(), lambda y, d_y: d_y.mul_(y).mul_(0.2)),
    'softmax': (_softmax_, lambda y, d_y: d_y.sub_((y * d_y).sum(dim=-1, keepdim=True)).mul_(y)),
}


def write_map(kernel: str, out: Tensor, x: Tensor) -> Tensor:
    """Write the feature map ``kernel`` of ``x`` (..., B, heads, N, d) to ``out`` of the same shape, computed in the
    dtype of ``out``. Both may be one tensor."""
    if kernel == 'elu' and dispatch.on_cpu(x):  # one pass over memory instead of a copy and a change in place
        return _write_elu_plus_one(out, x)
    return IN_PLACE[kernel][0](out.copy_(x))


def check_kernel(kernel: str, allowed: Collection[str]) -> str:
    """Return ``kernel`` if it is one of ``allowed``.

    Raises:
        ValueError: If it is not.
    """
    if kernel not in allowed:
        raise ValueError(f'kernel={kernel!r}: expected one of {list(allowed)}')
    return kernel


def unit(x: Tensor) -> Tensor:
    """Normalise vectors along the last axis, ``x / |x|``. Zero vectors stay zero and pass gradients unchanged."""
    # squares of the largest component would leave float16 in graphs, so it is scaled to 1
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1)
    square = (x * x).sum(dim=-1, keepdim=True)  # the second derivative of a norm would be NaN at 0
    return x / torch.where(square > 0, square, 1).sqrt()
