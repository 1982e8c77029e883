# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In blocks of tokens that stay in the cache; the backward pass computes maps and weights once more.

Names below: ``g`` mean query, ``w`` token weights a / N, ``z`` mean weighted key, ``S`` state, ``d_x`` gradient of x.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import accumulation_dtype, records
from ..kernels import kernel_map
from ..masks import count_tokens, padded_eps
from ..memory import differentiable, gradients_like, merge_heads, product, split_heads, token_blocks
from ..rotary.eager import rotate
from . import reference


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
    types = {t.dtype for t in (q, k, v, rotary) if t is not None}
    learns_rotary = records() and rotary is not None and rotary.requires_grad
    if types != {accumulation_dtype(q)} or kernel not in _MAPS or q.numel() == 0 or learns_rotary:
        return reference.rala(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
    if records():
        return _RALA.apply(q, k, v, rotary, num_heads, kernel, mask, weight_scale, eps)
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    return merge_heads(_forward(q, k, v, kernel, rotary, mask, weight_scale, eps)[0])


# The feature map in place, and the gradient of what was mapped from the mapped y and the gradient of y, in its place.
_MAPS = {
    'elu': (lambda x: F.elu_(x).add_(1), lambda y, d_y: d_y.mul_(y.clamp(max=1))),
    'relu': (F.relu_, lambda y, d_y: d_y.mul_(y > 0)),
    'softmax': (
        lambda x: x.copy_(kernel_map(x, 'softmax')),
        lambda y, d_y: d_y.sub_(torch.linalg.vecdot(y, d_y).unsqueeze(-1)).mul_(y),
    ),
}


def _forward(q, k, v, kernel, rotary, mask, weight_scale, eps):
    """The result and g, w, z, S of (B, heads, N, d) tensors; overwrites ``q`` and ``k``."""
    tokens, apply_map = q.shape[2], _MAPS[kernel][0]
    rows_of = list(token_blocks(q.numel() // tokens, tokens, q.device))
    real = None if mask is None else mask[:, None, :, None].to(q.dtype)  # (B, 1, N, 1)
    count = count_tokens(k, mask)
    total = 0
    for rows in rows_of:
        part = apply_map(q[:, :, rows])
        total = total + (part if real is None else part * real[:, :, rows]).sum(dim=2, keepdim=True)
    mean_query = total / count
    logits = []
    for rows in rows_of:
        part = apply_map(k[:, :, rows])
        if weight_scale is not None:
            logits.append(part @ mean_query.transpose(-1, -2))
    if weight_scale is None:
        weight = (q.new_ones(1, 1, tokens, 1) if real is None else real) / count
    else:
        weight = reference.token_weights(torch.cat(logits, dim=2).mul_(weight_scale), mask)
    key_mean, state = 0, 0
    for rows in rows_of:
        part = k[:, :, rows].mul_(weight[:, :, rows])
        key_mean = key_mean + part.sum(dim=2, keepdim=True)
        if rotary is not None:
            part = rotate(part, rotary[rows], inplace=True)
        state = state + part.transpose(-1, -2) @ v[:, :, rows]
    out = k if k.shape == v.shape else torch.empty_like(v)
    eps = padded_eps(eps, mask, q.dtype)
    for rows in rows_of:
        part, target = q[:, :, rows], out[:, :, rows]
        normaliser = torch.linalg.vecdot(part, key_mean).unsqueeze(-1) + eps
        if rotary is not None:
            part = rotate(part, rotary[rows], inplace=True)
        product(part, state, out=target).div_(normaliser)
    return out, mean_query, weight, key_mean, state


class _RALA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rotary, num_heads, kernel, mask, weight_scale, eps):
        scratch = (split_heads(t.clone(memory_format=torch.contiguous_format), num_heads) for t in (q, k))
        out, *state = _forward(*scratch, split_heads(v, num_heads), kernel, rotary, mask, weight_scale, eps)
        ctx.save_for_backward(q, k, v, rotary, mask, *state)
        ctx.options = num_heads, kernel, weight_scale, eps
        ctx.plain = 3, lambda q, k, v: reference.rala(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
        return merge_heads(out)

    @differentiable
    def backward(ctx, grad):
        q, k, v, rotary, mask, mean_query, weight, key_mean, state = ctx.saved_tensors
        num_heads, kernel, weight_scale, eps = ctx.options
        apply_map, undo_map = _MAPS[kernel]
        grads = gradients_like(q, k, v)
        d_q, d_k, d_v = (split_heads(t, num_heads) for t in grads)
        q, k, v, grad = (split_heads(t, num_heads) for t in (q, k, v, grad))
        tokens = q.shape[2]
        rows_of = list(token_blocks(q.numel() // tokens, tokens, q.device))
        real = None if mask is None else mask[:, None, :, None].to(q.dtype)
        count, eps = count_tokens(k, mask), padded_eps(eps, mask, q.dtype)
        back = None if rotary is None else torch.view_as_real(torch.view_as_complex(rotary).conj_physical())

        def mapped(x, rows):
            return apply_map(x[:, :, rows].clone(memory_format=torch.contiguous_format))

        # out = n / m with the numerator n_i = R_i q_i S and the normaliser m_i = q_i . z + eps
        d_state, d_mean = 0, 0
        for rows in rows_of:
            part, target = mapped(q, rows), d_q[:, :, rows]
            normaliser = torch.linalg.vecdot(part, key_mean).unsqueeze(-1) + eps
            d_numerator = grad[:, :, rows] / normaliser
            inner = d_numerator @ state.transpose(-1, -2)
            if rotary is not None:
                inner = rotate(inner, back[rows], inplace=True)
            # n_i . d_n_i = q_i . (R_i^T S d_n_i): the numerator itself is not needed
            d_normaliser = -torch.linalg.vecdot(part, inner).unsqueeze(-1) / normaliser
            d_mean = d_mean + d_normaliser.transpose(-1, -2) @ part
            target.copy_(inner.addcmul_(d_normaliser, key_mean))
            if rotary is not None:
                part = rotate(part, rotary[rows], inplace=True)
            d_state = d_state + part.transpose(-1, -2) @ d_numerator
        # S = sum_j w_j R_j k_j v_j^T and z = sum_j w_j k_j
        d_weight = []
        for rows in rows_of:
            part, share = mapped(k, rows), weight[:, :, rows]
            inner = v[:, :, rows] @ d_state.transpose(-1, -2)
            if rotary is not None:
                inner = rotate(inner, back[rows], inplace=True)
            inner.add_(d_mean)
            if weight_scale is not None:
                d_weight.append(torch.linalg.vecdot(part, inner).unsqueeze(-1))
            torch.mul(inner, share, out=d_k[:, :, rows])
            part.mul_(share)
            if rotary is not None:
                part = rotate(part, rotary[rows], inplace=True)
            d_v[:, :, rows].copy_(part @ d_state)
        # w = softmax_j(k_j . g * weight_scale) and g = mean_i q_i
        d_logits, d_query = None, 0
        if weight_scale is not None:
            d_weight = torch.cat(d_weight, dim=2)
            d_logits = weight * (d_weight - (weight * d_weight).sum(dim=2, keepdim=True)) * weight_scale
            if mask is not None:
                d_logits = d_logits.masked_fill_(~mask[:, None, :, None], 0)
        for rows in rows_of:
            part, target = mapped(k, rows), d_k[:, :, rows]
            if d_logits is not None:
                d_query = d_query + d_logits[:, :, rows].transpose(-1, -2) @ part
                target.addcmul_(d_logits[:, :, rows], mean_query)
            undo_map(part, target)
        for rows in rows_of:
            target = d_q[:, :, rows]
            if d_logits is not None:
                target.add_(d_query / count if real is None else d_query / count * real[:, :, rows])
            undo_map(mapped(q, rows), target)
        return *grads, *(None,) * 6
