# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .dispatch import accumulation_dtype, with_gradient
from .linear import equation
from .tokens import blocks, count_tokens, have_attention_shapes, padded_eps, split_heads


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    inverse_scale: Tensor,
    power: float,
    offset: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """Focused linear attention (FLatten Eq. 4-8), O(N d^2) for each head.

    :func:`~mmlinattn.ops.linear_attention` of ``phi_p(q)`` and ``phi_p(k + offset)``, with the focused map
    ``phi_p(x) = |r| / |r^p| r^p``, ``r = (ReLU(x) + eps) * inverse_scale``. Its norms are over all channels, before
    the split into heads. The maths runs in float32 or better: ``r^3`` overflows float16, and gradients grow with the
    inverse cube of small entries.

    Args:
        q (Tensor): Queries, (B, N, C).
        k (Tensor): Keys, (B, M, C).
        v (Tensor): Values, (B, M, E); zero for masked tokens.
        num_heads (int): Heads that C and E are split into after the map.
        inverse_scale (Tensor): (C,), ``1 / softplus(scale)``.
        power (float): Focusing factor p, in [1, 32].
        offset (Tensor, optional): Positions added to the keys before the map, broadcastable to (B, M, C).
        mask (Tensor, optional): (B, M) bool, True for valid tokens.
        eps (float): Added to the normaliser, and to ReLU(x) so that ``phi_p`` is defined for tokens without a
            positive entry.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    with dispatch.without_autocast(q):
        fits = inverse_scale.shape == q.shape[-1:] and have_attention_shapes(q, k, v, num_heads)
        op = _attention if fits else _equation
        return op(q, k, v, inverse_scale, offset, mask, num_heads=num_heads, power=power, eps=eps)


def _equation(q, k, v, inverse_scale, offset, mask, num_heads, power, eps) -> Tensor:
    k = k if offset is None else k + offset.to(k.dtype)
    q, k = (focused_map(t, inverse_scale, power, eps) for t in (q, k))
    return equation(q, k, v.to(q.dtype), None, mask, num_heads, 'identity', None, eps).to(v.dtype)


def focused_map(x: Tensor, inverse_scale: Tensor, power: float, eps: float = 1e-6) -> Tensor:
    """Compute ``phi_p`` of (..., C) tokens; half precision is computed and returned in float32."""
    wide = accumulation_dtype(x)
    r = (F.relu(x).to(wide) + eps) * inverse_scale.to(wide)
    # phi_p is homogeneous of degree one, so each token may be scaled to a largest component of 1
    part = r / r.amax(dim=-1, keepdim=True).detach()
    # F.threshold; not every exporter knows it
    powered = part.masked_fill(part <= smallest_base(wide, power), 0.0) ** power
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (r, powered)]
    return powered * (lengths[0] / lengths[1])


def smallest_base(dtype: torch.dtype, power: float) -> float:
    """Return the least ratio of a component to the largest component of a token; smaller ratios have the power 0.

    At this bound the power is 1e-15 in float32 (1e-75 in float64), far below the rounding of a sum with 1. Without the
    bound the powers, their squares, and their products with gradients would be denormal. Many CPUs compute with
    denormal numbers a hundred times more slowly.
    """
    return 10 ** ((-75.0 if dtype == torch.float64 else -15.0) / power)


# --- analytic gradient: the backward pass recomputes the focused map --------------------------------------------------


def _add_offset(k: Tensor, offset: Optional[Tensor], images: slice, rows: slice) -> Tensor:
    part = k[images, rows]
    return part if offset is None else part + offset.expand_as(k)[images, rows].to(k.dtype)


def _normaliser(x: Tensor, key_mean: Tensor, floor: Tensor) -> Tensor:
    """Return (B, N, heads, 1): the products of ``x`` (B, N, C) and the mean keys (B, 1, heads, d), plus ``floor``."""
    # on CPUs, a matrix-vector product for each head and image takes several times as long as a sum of products
    return torch.linalg.vecdot(x.unflatten(-1, key_mean.shape[2:]), key_mean).unsqueeze(-1).add_(floor)


def _powers(x: Tensor, inverse_scale: Tensor, power: float, eps: float, keeps_base: bool = False) -> tuple[Tensor, ...]:
    """Return y (B, N, C), proportional to ``r ** power``, the factor (B, N, 1) that gives y the norm of r, r, and |r|.
    ``r = (ReLU(x) + eps) * inverse_scale`` is the base of the power. Unless ``keeps_base``, y overwrites r."""
    r = x.to(inverse_scale.dtype).relu()
    r = torch.addcmul(inverse_scale * eps, r, inverse_scale, out=r)
    norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
    scale = r.amax(dim=-1, keepdim=True).reciprocal_()
    y = r * scale if keeps_base else r.mul_(scale)
    y = torch.threshold_(y, smallest_base(y.dtype, power), 0.0).pow_(power)
    return y, norm / torch.linalg.vector_norm(y, dim=-1, keepdim=True), r, norm


def _focus(x: Tensor, inverse_scale: Tensor, power: float, eps: float) -> Tensor:
    y, factor, _, _ = _powers(x, inverse_scale, power, eps)
    return y.mul_(factor)


def _focus_with_base(x: Tensor, inverse_scale: Tensor, power: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the focused map of (B, N, C) tokens, r and |r|."""
    y, factor, r, norm = _powers(x, inverse_scale, power, eps, keeps_base=True)
    return y.mul_(factor), r, norm


def _focus_backward(x, grad, y, r, norm, inverse_scale, power, out) -> Tensor:
    """Write the gradient of the tokens ``x`` to ``out``; return ``inverse_scale`` times its own gradient, (C,).
    ``grad`` is the gradient of the focused tokens ``y``; ``y``, ``r`` and ``norm`` come from :func:`_focus_with_base`.
    ``y`` and ``r`` are overwritten."""
    # y = |r| / |r^p| r^p:  dL/dr = (g.y) r / |r|^2 + p y / r (g - (g.y) y / |r|^2)
    along = torch.linalg.vecdot(grad, y).unsqueeze(-1) / norm.square()
    inner = torch.addcmul(grad, along, y, value=-1)
    grad_r = torch.mul(r, along).addcmul_(y.div_(r), inner, value=power)
    grad_scale = r.mul_(grad_r).sum(dim=(0, 1))
    grad_r.mul_(inverse_scale)
    if out.dtype == grad_r.dtype:
        private_apis.RELU_BACKWARD(grad_r, x, 0, grad_input=out)
    else:
        out.copy_(grad_r.masked_fill_(x <= 0, 0))
    return grad_scale


def _forward(q, k, v, inverse_scale, offset, mask, num_heads, power, eps):
    """Compute :func:`focused_attention`, with its arguments.

    Return the output, and for :func:`_backward` the state, the mean keys and the eps added to the normaliser.
    """
    wide = accumulation_dtype(q)
    scale = inverse_scale.to(wide)
    batch, count = len(k), count_tokens(k, mask)
    state = scale.new_zeros(batch, num_heads, q.shape[-1] // num_heads, v.shape[-1] // num_heads)
    key_mean = scale.new_zeros(batch, 1, k.shape[-1])
    for images, rows in blocks(k, *k.shape[:2]):
        keys = _focus(_add_offset(k, offset, images, rows), scale, power, eps)
        values = split_heads(v[images, rows].to(wide), num_heads)
        state[images] += split_heads(keys, num_heads).transpose(-1, -2) @ values
        if mask is None:
            key_mean[images] += keys.sum(dim=1, keepdim=True)
        else:
            key_mean[images] += mask[images, None, rows].to(wide) @ keys
    state /= count
    key_mean = key_mean.unflatten(-1, (num_heads, -1)) / count  # (B, 1, heads, d)
    floor = scale.new_zeros(batch, 1, 1, 1) + padded_eps(eps, mask, wide)
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype, device=v.device)
    for images, rows in blocks(q, *q.shape[:2]):
        # The norm of a query is a factor of numerator and normaliser, so it is left out of both; eps is divided by it.
        queries, factor, _, _ = _powers(q[images, rows], scale, power, eps)
        normaliser = _normaliser(queries, key_mean[images], floor[images] / factor.unsqueeze(-1))
        mixed = (split_heads(queries, num_heads) @ state[images]).transpose(1, 2)
        torch.div(mixed, normaliser, out=out[images, rows].unflatten(-1, (num_heads, -1)))
    return out, (state, key_mean, floor)


def _backward(grads, inputs, kept, wanted, num_heads, power, eps):
    """Return the gradients of the inputs; for the arguments see :func:`.dispatch.function_of`."""
    (q, k, v, inverse_scale, offset, mask), (state, key_mean, floor), (grad,) = inputs, kept, grads
    scale = inverse_scale.to(state.dtype)
    grad_q, grad_k, grad_v = [torch.empty_like(t) for t in (q, k, v)]
    grad_state, grad_mean, grad_scale = torch.zeros_like(state), torch.zeros_like(key_mean), torch.zeros_like(scale)
    for images, rows in blocks(q, *q.shape[:2]):
        part = q[images, rows]
        y, r, norm = _focus_with_base(part, scale, power, eps)
        queries, means = y.unflatten(-1, (num_heads, -1)), key_mean[images]
        normaliser = _normaliser(y, means, floor[images])
        # g is the gradient of the numerator, (B, N, heads, e)
        g = grad[images, rows].to(scale.dtype).unflatten(-1, (num_heads, -1)) / normaliser
        inner = (g.transpose(1, 2) @ state[images].transpose(-1, -2)).transpose(1, 2)
        # g . out = queries . (state g): the numerator itself is not needed
        grad_normaliser = -torch.linalg.vecdot(queries, inner).unsqueeze(-1) / normaliser
        grad_state[images] += queries.permute(0, 2, 3, 1) @ g.transpose(1, 2)
        grad_mean[images] += (queries * grad_normaliser).sum(dim=1, keepdim=True)
        inner = inner.addcmul_(grad_normaliser, means).flatten(2)
        grad_scale += _focus_backward(part, inner, y, r, norm, scale, power, grad_q[images, rows])
    count = count_tokens(k, mask)
    grad_state /= count
    grad_mean = (grad_mean / count).flatten(2)  # (B, 1, C)
    for images, rows in blocks(k, *k.shape[:2]):
        part = _add_offset(k, offset, images, rows)
        y, r, norm = _focus_with_base(part, scale, power, eps)
        values = split_heads(v[images, rows].to(scale.dtype), num_heads)
        split_heads(grad_v[images, rows], num_heads).copy_(split_heads(y, num_heads) @ grad_state[images])
        inner = (values @ grad_state[images].transpose(-1, -2)).transpose(1, 2).flatten(2)
        if mask is None:
            inner = inner.add_(grad_mean[images])
        else:
            inner = inner.addcmul_(mask[images, rows, None].to(inner.dtype), grad_mean[images])
        grad_scale += _focus_backward(part, inner, y, r, norm, scale, power, grad_k[images, rows])
    grad_scale = (grad_scale / scale).to(inverse_scale.dtype)
    grad_offset = None if offset is None else grad_k.sum_to_size(offset.shape).to(offset.dtype)
    return grad_q, grad_k, grad_v, grad_scale, grad_offset, None


_attention = with_gradient(_equation, _forward, _backward)
