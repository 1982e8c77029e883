# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In blocks of tokens that stay in the cache from the map to the product; the backward pass maps once more."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import forms
from ..forms import accumulation_dtype
from ..masks import padded_eps
from ..memory import blocks, differentiable, gradients_like, product, split_heads
from . import reference
from .reference import smallest_base


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
    if offset is not None:
        k = k + offset.to(k.dtype) if forms.records() else k.add_(offset)
    return _FocusedAttention.apply(q, k, v, inverse_scale, power, num_heads, mask, eps)


def _normaliser(x: Tensor, key_mean: Tensor, floor: Tensor) -> Tensor:
    """``x`` (B, N, C) by the mean key (B, 1, heads, d) of each head plus ``floor``, (B, N, heads, 1)."""
    # As a matrix product this would be, for each head and image, one of a matrix with a vector: on CPUs several times
    # as slow as the sum of products.
    return torch.linalg.vecdot(x.unflatten(-1, key_mean.shape[2:]), key_mean).unsqueeze(-1).add_(floor)


def _powers(x: Tensor, inverse_scale: Tensor, power: float, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For some tokens (b, n, C): the map but for its length, that missing factor (b, n, 1), r and |r| (b, n, 1)."""
    r = torch.addcmul(inverse_scale * eps, x.relu().to(inverse_scale.dtype), inverse_scale)
    norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
    part = r * r.amax(dim=-1, keepdim=True).reciprocal_()
    y = F.threshold_(part, smallest_base(r.dtype, power), 0.0).pow_(power)
    return y, norm / torch.linalg.vector_norm(y, dim=-1, keepdim=True), r, norm


def _focus(x: Tensor, inverse_scale: Tensor, power: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The map of some tokens, r and |r|."""
    y, factor, r, norm = _powers(x, inverse_scale, power, eps)
    return y.mul_(factor), r, norm


def _focus_backward(x, grad, y, r, norm, inverse_scale, power) -> tuple[Tensor, Tensor]:
    """Gradients of some tokens and of ``inverse_scale`` (times itself); overwrites ``y`` and ``r``."""
    # y = |r| / |r^p| r^p:  dL/dr = (g.y) r / |r|^2 + p y / r (g - (g.y) y / |r|^2)
    along = torch.linalg.vecdot(grad, y).unsqueeze(-1) / norm.square()
    inner = torch.addcmul(grad, along, y, value=-1)
    grad_r = y.div_(r).mul_(inner).mul_(power).addcmul_(along, r)
    grad_scale = r.mul_(grad_r).sum(dim=(0, 1))
    return grad_r.mul_(inverse_scale).masked_fill_(x <= 0, 0), grad_scale


class _FocusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, inverse_scale, power, num_heads, mask, eps):
        wide = accumulation_dtype(q)
        scale = inverse_scale.to(wide)
        batch, tokens = k.shape[:2]
        state = scale.new_zeros(batch, num_heads, q.shape[-1] // num_heads, v.shape[-1] // num_heads)
        key_mean = scale.new_zeros(batch, 1, k.shape[-1])
        count = scale.new_full((batch,), tokens) if mask is None else mask.sum(dim=1).clamp(min=1).to(wide)
        for images, rows in blocks(k):
            keys, *_ = _focus(k[images, rows], scale, power, eps)
            values = v[images, rows].to(wide)
            state[images] += split_heads(keys, num_heads).transpose(-1, -2) @ split_heads(values, num_heads)
            if mask is None:
                key_mean[images] += keys.sum(dim=1, keepdim=True)
            else:
                key_mean[images] += mask[images, None, rows].to(wide) @ keys
        state /= count[:, None, None, None]
        key_mean = (key_mean / count[:, None, None]).unflatten(-1, (num_heads, -1))  # (B, 1, heads, d)
        floor = scale.new_zeros(batch, 1, 1, 1) + padded_eps(eps, mask, wide)
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype, device=v.device)
        for images, rows in blocks(q):
            # The length of a query is a factor of numerator and denominator, so it is left out of both; what is added
            # to the denominator is divided by it instead.
            queries, factor, *_ = _powers(q[images, rows], scale, power, eps)
            target = out[images, rows]
            mixed = target if target.dtype == wide else torch.empty_like(target, dtype=wide)
            product(split_heads(queries, num_heads), state[images], out=split_heads(mixed, num_heads))
            mixed = mixed.unflatten(-1, (num_heads, -1))
            normaliser = _normaliser(queries, key_mean[images], floor[images] / factor.unsqueeze(-1))
            torch.div(mixed, normaliser, out=target.unflatten(-1, (num_heads, -1)))
        ctx.save_for_backward(q, k, v, inverse_scale, mask, state, key_mean, count, floor)
        ctx.options = power, num_heads, eps
        ctx.plain = (
            4,
            lambda q, k, v, inverse_scale: reference.focused_attention(
                q, k, v, num_heads, inverse_scale, power, None, mask, eps
            ),
        )
        return out

    @differentiable
    def backward(ctx, grad):
        q, k, v, inverse_scale, mask, state, key_mean, count, floor = ctx.saved_tensors
        power, num_heads, eps = ctx.options
        scale = inverse_scale.to(state.dtype)
        grad_q, grad_k, grad_v = gradients_like(q, k, v)
        grad_state, grad_mean, grad_scale = torch.zeros_like(state), torch.zeros_like(key_mean), torch.zeros_like(scale)
        for images, rows in blocks(q):
            part = q[images, rows]
            y, r, norm = _focus(part, scale, power, eps)
            queries, means = y.unflatten(-1, (num_heads, -1)), key_mean[images]
            normaliser = _normaliser(y, means, floor[images])
            # of the numerator, heads side by side
            g = grad[images, rows].to(scale.dtype).unflatten(-1, (num_heads, -1)) / normaliser
            inner = product(g.transpose(1, 2), state[images].transpose(-1, -2)).transpose(1, 2)
            # g . out = queries . (state g): the numerator itself is not needed
            grad_normaliser = -torch.linalg.vecdot(queries, inner).unsqueeze(-1) / normaliser
            grad_state[images] += queries.permute(0, 2, 3, 1) @ g.transpose(1, 2)
            grad_mean[images] += (queries * grad_normaliser).sum(dim=1, keepdim=True)
            inner = inner.addcmul_(grad_normaliser, means).flatten(2)
            grad_q[images, rows], along_scale = _focus_backward(part, inner, y, r, norm, scale, power)
            grad_scale += along_scale
        grad_state /= count[:, None, None, None]
        grad_mean = (grad_mean / count[:, None, None, None]).flatten(2)  # (B, 1, C)
        for images, rows in blocks(k):
            part = k[images, rows]
            y, r, norm = _focus(part, scale, power, eps)
            values = split_heads(v[images, rows].to(scale.dtype), num_heads)
            split_heads(grad_v[images, rows], num_heads).copy_(split_heads(y, num_heads) @ grad_state[images])
            inner = product(values, grad_state[images].transpose(-1, -2)).transpose(1, 2).flatten(2)
            if mask is None:
                inner += grad_mean[images]
            else:
                inner.addcmul_(mask[images, rows, None].to(inner.dtype), grad_mean[images])
            grad_k[images, rows], along_scale = _focus_backward(part, inner, y, r, norm, scale, power)
            grad_scale += along_scale
        grad_scale = (grad_scale / scale).to(inverse_scale.dtype)
        return grad_q, grad_k, grad_v, grad_scale, None, None, None, None
