# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear attentions some tokens at a time.

A dozen operations lie between a projected query or key and its product with the state. On CPUs they run on blocks of
tokens that stay in the cache from the first of them to the last; in one go, each would fetch and write the whole
tensor.
"""

from typing import Optional

import torch
from torch import Tensor

from ..layers.autocast import without_autocast
from ..layers.tracing import is_traced
from .functional import accumulation_dtype, focused_map, kernel_map, linear_attention, padded_eps, product, rotate
from .slices import gradients_like

# elements a thread: with fewer the calls of the operations cost, with many more the blocks leave the cache
BLOCK_NUMEL = 2**18


def rala_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    weight_scale: Optional[float] = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`~mmlinattn.attention.functional.rala` of queries and keys before their map, for inference in float32 or
    float64: ``q`` and ``k`` are overwritten, ``k`` with the result where it has the shape of ``v``.

    Args:
        q, k (Tensor): Queries and keys, (B, heads, N, d).
        kernel (str): See :func:`~mmlinattn.attention.functional.kernel_map`.
        v, rotary, mask, weight_scale, eps: See :func:`~mmlinattn.attention.functional.rala`.

    Returns:
        Tensor: (B, heads, N, e).
    """
    batch, _, tokens, _ = q.shape
    real = None if mask is None else mask[:, None, :, None].to(q.dtype)  # (B, 1, N, 1)
    count = q.new_tensor(tokens) if real is None else real.sum(dim=2, keepdim=True).clamp(min=1)
    blocks = list(_token_blocks(q.numel() // tokens, tokens, q.device))
    total = 0
    for rows in blocks:
        part = kernel_map(q[:, :, rows], kernel, inplace=True)
        total = total + (part if real is None else part * real[:, :, rows]).sum(dim=2, keepdim=True)
    query = (total / count).transpose(-1, -2)
    logits = []
    for rows in blocks:
        part = kernel_map(k[:, :, rows], kernel, inplace=True)
        if weight_scale is not None:
            logits.append(part @ query)
    if weight_scale is None:
        weight = (q.new_ones(1, 1, tokens, 1) if real is None else real) / count
    else:
        logits = torch.cat(logits, dim=2).mul_(weight_scale)
        if mask is not None:
            logits.masked_fill_(~mask[:, None, :, None], torch.finfo(q.dtype).min)
        weight = logits.softmax(dim=2)
    key_mean, state = 0, 0
    for rows in blocks:
        part = k[:, :, rows].mul_(weight[:, :, rows])
        key_mean = key_mean + part.sum(dim=2, keepdim=True)
        if rotary is not None:
            part = rotate(part, rotary[rows], inplace=True)
        state = state + part.transpose(-1, -2) @ v[:, :, rows]
    out = k if k.shape == v.shape else torch.empty_like(v)
    eps = padded_eps(eps, mask, q.dtype)
    for rows in blocks:
        part, target = q[:, :, rows], out[:, :, rows]
        normaliser = torch.linalg.vecdot(part, key_mean).unsqueeze(-1) + eps
        if rotary is not None:
            part = rotate(part, rotary[rows], inplace=True)
        product(part, state, out=target).div_(normaliser)
    return out


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse_scale: Tensor,
    power: float,
    num_heads: int,
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`~mmlinattn.attention.functional.linear_attention` on queries and keys after
    :func:`~mmlinattn.attention.functional.focused_map` (FLatten Eq. 4-8), O(N d^2).

    Args:
        q (Tensor): Queries, (B, N, C).
        k (Tensor): Keys, (B, M, C).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        inverse_scale, power: See :func:`~mmlinattn.attention.functional.focused_map`.
        num_heads (int): Heads that C and E are split into after the map.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        eps (float): Of the map and of the normaliser.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``; the maths runs in float32 or better.
    """
    # in half precision the gradients of small entries, which the map makes smaller, would overflow
    with without_autocast(v):
        if not is_traced():
            return _FocusedAttention.apply(q, k, v, inverse_scale, power, num_heads, mask, eps)
        # compilers fuse the plain form
        queries, keys = (focused_map(t, inverse_scale, power, eps) for t in (q, k))
        parts = [_by_head(t, num_heads) for t in (queries, keys, v.to(queries.dtype))]
        return linear_attention(*parts, mask, eps).transpose(1, 2).flatten(2).to(v.dtype)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, C) -> (B, heads, N, d), a view."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _normaliser(x: Tensor, key_mean: Tensor, floor: Tensor) -> Tensor:
    """``x`` (B, N, C) by the mean key (B, 1, heads, d) of each head plus ``floor``, (B, N, heads, 1)."""
    # a product of matrices would be one with a vector for each head, the slowest of all
    return torch.linalg.vecdot(x.unflatten(-1, key_mean.shape[2:]), key_mean).unsqueeze(-1).add_(floor)


def _token_blocks(width: int, tokens: int, device: torch.device):
    """Slices of ``tokens`` of ``width`` numbers each that make blocks of a size for the cache; all at once on GPUs."""
    size = max(1, torch.get_num_threads() * BLOCK_NUMEL // width) if device.type == 'cpu' else max(1, tokens)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def _blocks(x: Tensor):
    """Slices of images and tokens of (B, N, C) for :func:`_token_blocks`, of several images where they are small."""
    batch, tokens, width = x.shape
    blocks = list(_token_blocks(width, tokens, x.device))
    # an image of several blocks is more than a block: one at a time then
    for images in _token_blocks(tokens * width, batch, x.device):
        for rows in blocks:
            yield images, rows


def _powers(x: Tensor, inverse_scale: Tensor, power: float, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A multiple of the map of some tokens, what each is to be multiplied with, r and |r| of
    :func:`~mmlinattn.attention.functional.focused_map`."""
    r = torch.addcmul(inverse_scale * eps, x.relu().to(inverse_scale.dtype), inverse_scale)
    norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
    # homogeneous of degree one: a token may be scaled so that its powers neither over- nor underflow. Its norm is
    # at hand; the largest component of a unit vector is at least C ** -0.5, too little for high powers
    size = norm if power <= 6 else r.amax(dim=-1, keepdim=True)
    y = (r * size.reciprocal()).pow_(power)
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
        for images, rows in _blocks(k):
            keys, *_ = _focus(k[images, rows], scale, power, eps)
            values = v[images, rows].to(wide)
            state[images] += _by_head(keys, num_heads).transpose(-1, -2) @ _by_head(values, num_heads)
            if mask is None:
                key_mean[images] += keys.sum(dim=1, keepdim=True)
            else:
                key_mean[images] += mask[images, None, rows].to(wide) @ keys
        state /= count[:, None, None, None]
        key_mean = (key_mean / count[:, None, None]).unflatten(-1, (num_heads, -1))  # (B, 1, heads, d)
        floor = scale.new_zeros(batch, 1, 1, 1) + padded_eps(eps, mask, wide)
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=v.dtype, device=v.device)
        for images, rows in _blocks(q):
            # a factor of the query is one of numerator and denominator
            queries, factor, *_ = _powers(q[images, rows], scale, power, eps)
            target = out[images, rows]
            mixed = target if target.dtype == wide else torch.empty_like(target, dtype=wide)
            product(_by_head(queries, num_heads), state[images], out=_by_head(mixed, num_heads))
            mixed = mixed.unflatten(-1, (num_heads, -1))
            normaliser = _normaliser(queries, key_mean[images], floor[images] / factor.unsqueeze(-1))
            torch.div(mixed, normaliser, out=target.unflatten(-1, (num_heads, -1)))
        ctx.save_for_backward(q, k, v, inverse_scale, mask, state, key_mean, count, floor)
        ctx.options = power, num_heads, eps
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, inverse_scale, mask, state, key_mean, count, floor = ctx.saved_tensors
        power, num_heads, eps = ctx.options
        scale = inverse_scale.to(state.dtype)
        grad_q, grad_k, grad_v = gradients_like(q, k, v)
        grad_state, grad_mean, grad_scale = torch.zeros_like(state), torch.zeros_like(key_mean), torch.zeros_like(scale)
        for images, rows in _blocks(q):
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
        for images, rows in _blocks(k):
            part = k[images, rows]
            y, r, norm = _focus(part, scale, power, eps)
            values = _by_head(v[images, rows].to(scale.dtype), num_heads)
            _by_head(grad_v[images, rows], num_heads).copy_(_by_head(y, num_heads) @ grad_state[images])
            inner = product(values, grad_state[images].transpose(-1, -2)).transpose(1, 2).flatten(2)
            if mask is None:
                inner += grad_mean[images]
            else:
                inner.addcmul_(mask[images, rows, None].to(inner.dtype), grad_mean[images])
            grad_k[images, rows], along_scale = _focus_backward(part, inner, y, r, norm, scale, power)
            grad_scale += along_scale
        grad_scale = (grad_scale / scale).to(inverse_scale.dtype)
        return grad_q, grad_k, grad_v, grad_scale, None, None, None, None
