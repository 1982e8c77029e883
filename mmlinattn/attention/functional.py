# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The equations as pure functions on (B, heads, N, d) tensors.

Each has a quadratic twin in ``tests/attention/reference.py`` that builds the N x N map literally. Sums over tokens
are accumulated in float32 or better, whatever the dtype of the inputs.
"""

from typing import Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.autocast import without_autocast
from ..layers.tracing import is_traced
from .slices import gradients_like


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float32 for half precision, the dtype itself otherwise."""
    return torch.promote_types(x.dtype, torch.float32)


def overwrites() -> bool:
    """Whether queries, keys and values may be overwritten: in inference, unless a compiler decides on the memory."""
    return not torch.is_grad_enabled() and not is_traced()


def rotate(x: Tensor, rotary: Tensor, inplace: bool = False) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Args:
        x (Tensor): (B, heads, N, d).
        rotary (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`mmlinattn.layers.rotary_table`.
        inplace (bool): ``x`` may be overwritten.

    Returns:
        Tensor: As ``x``.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == rotary.dtype and not is_traced():
        # a product of complex numbers is one pass over the memory; compilers fuse the plain form and know no complex
        # types
        x, turn = torch.view_as_complex(pairs), torch.view_as_complex(rotary)
        return torch.view_as_real(x.mul_(turn) if inplace else x * turn).flatten(-2)
    cos, sin = rotary.unbind(-1)
    first, second = pairs.unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def kernel_map(x: Tensor, kernel: str, inplace: bool = False) -> Tensor:
    """The kernel function kappa of RALA (RALA Tab. 9): ``'elu'`` (ELU + 1), ``'relu'`` or ``'softmax'`` (over
    channels). ``inplace``: ``x`` may be overwritten."""
    if kernel == 'elu':
        if inplace:
            return F.elu_(x).add_(1)
        if x.dtype in (torch.float32, torch.float64) and not is_traced():
            return _ELUPlusOne.apply(x)
        return F.elu(x).add_(1)  # the backward pass of ELU reads its input, not its output
    if kernel == 'relu':
        return F.relu(x, inplace=inplace)
    return x.copy_(x.softmax(dim=-1)) if inplace else x.softmax(dim=-1)


class _ELUPlusOne(torch.autograd.Function):
    """ELU + 1, whose derivative is the smaller of the result and 1: what it maps need not be kept."""

    @staticmethod
    def forward(ctx, x):
        y = F.elu(x).add_(1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y.clamp(max=1).mul_(grad)


def rala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    weight_scale: Optional[float] = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Rank-augmented linear attention on mapped queries and keys (RALA Eq. 2-4), O(N d^2).

    The context-aware weights ``a = N softmax_tokens(mean(q) k^T * weight_scale)`` multiply the keys (Eq. 3, 4); then
    ``out_i = q_i (1/N sum_j a_j k_j v_j^T) / (q_i . mean_j(a_j k_j) + eps)``. The rotary encoding enters the numerator
    only.

    Args:
        q, k (Tensor): Mapped (non-negative) queries and keys, (B, heads, N, d).
        v (Tensor): Values, (B, heads, N, e); zero where ``mask`` is False.
        rotary (Tensor, optional): See :func:`rotate`.
        mask (Tensor, optional): (B, N) bool, True for real tokens.
        weight_scale (float, optional): Scale of the weights' logits (1 in the paper, ``d ** -0.5`` in the release);
            None weighs all tokens alike.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, heads, N, e), in the dtype of ``v``.
    """
    wide = accumulation_dtype(q)
    real = None if mask is None else mask[:, None, :, None].to(wide)  # (B, 1, N, 1)
    count = q.new_tensor(q.shape[2], dtype=wide) if real is None else real.sum(dim=2, keepdim=True).clamp(min=1)
    if weight_scale is not None:
        query = (q if real is None else q * real).sum(dim=2, keepdim=True, dtype=wide) / count
        logits = (k @ query.to(k.dtype).transpose(-1, -2)).to(wide) * weight_scale  # (B, heads, N, 1)
        if mask is not None:
            # not minus infinity: where all tokens are padding, the weights and their gradients would be NaN
            logits = logits.masked_fill(~mask[:, None, :, None], torch.finfo(wide).min)
        weight = logits.softmax(dim=2)
    else:
        weight = (q.new_ones(1, 1, q.shape[2], 1, dtype=wide) if real is None else real) / count
    key_mean = (k.transpose(-1, -2).to(wide) @ weight).to(q.dtype)  # sum_j a_j k_j / N, (B, heads, d, 1)
    normaliser = (q @ key_mean).to(wide) + padded_eps(eps, mask, wide)
    q = (q / normaliser).to(q.dtype)  # dividing the result instead would keep one map more for the backward pass
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N leaves the range of float16; its root on each factor does not
        k, v = (k * count.rsqrt()).to(q.dtype), (v * (weight * count.sqrt())).to(q.dtype)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return q @ (k.transpose(-1, -2) @ v)


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """``eps``, or (B, 1, 1, 1) with 1 more where all tokens are padding: the values are zero there, and anything does
    that keeps queries and gradients in range."""
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


def product(x: Tensor, matrix: Tensor, shift: Optional[Tensor] = None, out: Optional[Tensor] = None) -> Tensor:
    """``x @ matrix + shift`` in memory where the heads of a token lie side by side; not recorded by autograd.

    Args:
        x (Tensor): (B, heads, N, d).
        matrix (Tensor): (B, heads, d, e).
        shift (Tensor, optional): (B, heads, 1, e).
        out (Tensor, optional): Memory to write to, (B, heads, N, e).

    Returns:
        Tensor: (B, heads, N, e); merging its heads is free.
    """
    batch, heads, tokens = x.shape[:3]
    if out is None:
        out = x.new_empty(batch, tokens, heads, matrix.shape[-1]).transpose(1, 2)
    if batch > 32:  # many small products are better made at once, and copied
        return out.copy_(x @ matrix if shift is None else (x @ matrix).add_(shift))
    for i in range(batch):
        if shift is None:
            torch.bmm(x[i], matrix[i], out=out[i])
        else:
            torch.baddbmm(shift[i], x[i], matrix[i], out=out[i])
    return out


def token_means(mask: Optional[Tensor], like: Tensor, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Number of real tokens, and means over them: (B, heads, M, d) -> (B, heads, 1, d), in float32 or better."""
    wide = accumulation_dtype(like)
    if mask is None:
        count = like.new_tensor(like.shape[2], dtype=wide)
        return count, [t.sum(dim=2, keepdim=True, dtype=wide) / count for t in tensors]
    real = mask[:, None, None].to(wide)  # (B, 1, 1, M): a product with it is a masked sum without a masked copy
    count = real.sum(dim=-1, keepdim=True).clamp(min=1)
    return count, [(real @ t.to(wide)) / count for t in tensors]


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """Linear attention with division: ``out_i = q_i (1/N sum_j k_j v_j^T) / (q_i . mean_j(k_j) + eps)``, O(N d^2).

    Source: Katharopoulos et al. 2020, Eq. 5; FLatten Eq. 4; InLine Eq. 2.

    Args:
        q, k (Tensor): Mapped queries (B, heads, N, d) and keys (B, heads, M, d).
        v (Tensor): Values, (B, heads, M, e); zero where ``mask`` is False.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        eps (float): Added to the normaliser.

    Returns:
        Tensor: (B, heads, N, e), in the dtype of ``v``.
    """
    count, (key_mean,) = token_means(mask, k, k)
    normaliser = (q @ key_mean.to(q.dtype).transpose(-1, -2)).to(count.dtype) + padded_eps(eps, mask, count.dtype)
    if count.dtype == q.dtype:
        state = (k.transpose(-1, -2) @ v) / count  # padded values are zero, so padded keys do not matter
    else:
        root = count.rsqrt()  # 1/N leaves the range of float16; its root on each factor does not
        state = (k * root).to(q.dtype).transpose(-1, -2) @ (v * root).to(q.dtype)
    out = q @ state
    # the backward pass of a division reads what was divided; in inference it is overwritten
    return (out / normaliser if out.requires_grad else out.div_(normaliser)).to(v.dtype)


def inline_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Optional[Tensor] = None, inplace: bool = False
) -> Tensor:
    """Injective linear attention (InLine Eq. 3-5), O(N d^2).

    The weights ``(scale q_i . (k_j - mean(k)) + 1) / N`` sum to 1 without a division, so
    ``out_i = mean(v) + scale q_i cov(k, v)``: one small state, one pass over the queries.

    Args:
        q, k (Tensor): Mapped queries (B, heads, N, d) and keys (B, heads, M, d).
        v (Tensor): Values, (B, heads, M, e); zero where ``mask`` is False.
        scale (float): ``d ** -0.5`` in the release.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        inplace (bool): ``k`` may be overwritten, where no gradients are recorded.

    Returns:
        Tensor: (B, heads, N, e), in the dtype of ``v``.
    """
    if q.dtype == accumulation_dtype(q) == v.dtype and not is_traced():
        with without_autocast(q):
            return _InLineAttention.apply(q, k, v, scale, mask, inplace)
    count, (key_mean, value_mean) = token_means(mask, k, k, v)
    # centred before the product: the difference of two rounded products would lose what half precision has left
    root = count.rsqrt()
    centred = ((k - key_mean) * root).to(q.dtype)
    covariance = centred.transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return (q @ covariance + value_mean.to(q.dtype)).to(v.dtype)


class _InLineAttention(torch.autograd.Function):
    """Each way one product a tensor, straight into memory where the heads of a token lie side by side."""

    @staticmethod
    def forward(ctx, q, k, v, scale, mask, inplace):
        count, (key_mean, value_mean) = token_means(mask, k, k, v)
        covariance = (k.transpose(-1, -2) @ v) * (scale / count) - key_mean.transpose(-1, -2) * (value_mean * scale)
        ctx.save_for_backward(q, k, v, covariance, key_mean, value_mean, count, mask)
        ctx.scale = scale
        return product(q, covariance, value_mean, out=k if inplace and k.shape == v.shape == q.shape else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, covariance, key_mean, value_mean, count, mask = ctx.saved_tensors
        each = grad.sum(dim=2, keepdim=True) / count  # of the value mean's share in every token
        inner = (q.transpose(-1, -2) @ grad) * (ctx.scale / count)
        grads = grad_q, grad_k, grad_v = gradients_like(q, k, v)
        product(grad, covariance.transpose(-1, -2), out=grad_q)
        product(v, inner.transpose(-1, -2), -value_mean @ inner.transpose(-1, -2), out=grad_k)
        product(k, inner, each - key_mean @ inner, out=grad_v)
        if mask is not None:
            for part in (grad_k, grad_v):
                part.mul_(mask[:, None, :, None])
        return *grads, None, None, None


def focused_map(x: Tensor, inverse_scale: Tensor, power: float, eps: float = 1e-6) -> Tensor:
    """Focused feature map ``phi_p(x) = |r| / |r^p| r^p``, ``r = (ReLU(x) + eps) * inverse_scale`` (FLatten Eq. 7-8).

    Norms are over the last axis: all channels, before the split into heads. The maths runs in float32 or better,
    ``r^3`` overflows float16.

    Args:
        x (Tensor): (..., C).
        inverse_scale (Tensor): (C,), ``1 / softplus(scale)``.
        power (float): Focusing factor p.
        eps (float): Keeps directions of dead tokens defined.

    Returns:
        Tensor: As ``x``, in float32 for half precision: gradients grow with the inverse cube of small entries.
    """
    wide = accumulation_dtype(x)
    r = (F.relu(x).to(wide) + eps) * inverse_scale.to(wide)
    # homogeneous of degree one: a token may be scaled so that its powers neither over- nor underflow
    powered = (r / r.amax(dim=-1, keepdim=True).detach()) ** power
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (r, powered)]
    return powered * (lengths[0] / lengths[1])
