# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The equations as pure functions on (B, heads, N, d) tensors.

Each has a quadratic twin in ``tests/attention/reference.py`` that builds the N x N map literally. Sums over tokens
are accumulated in float32 or better, whatever the dtype of the inputs.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float32 for half precision, the dtype itself otherwise."""
    return torch.promote_types(x.dtype, torch.float32)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Args:
        x (Tensor): (B, heads, N, d).
        rotary (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`mmlinattn.layers.rotary_table`.

    Returns:
        Tensor: As ``x``.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == rotary.dtype and not torch.compiler.is_compiling():
        # a product of complex numbers is one pass over the memory; compilers fuse the plain form and know no complex
        # types
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotary)).flatten(-2)
    cos, sin = rotary.unbind(-1)
    first, second = pairs.unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def kernel_map(x: Tensor, kernel: str) -> Tensor:
    """The kernel function kappa of RALA (RALA Tab. 9): ``'elu'`` (ELU + 1), ``'relu'`` or ``'softmax'`` (over
    channels)."""
    if kernel == 'elu':
        return F.elu(x).add_(1)  # the backward pass of ELU reads its input, not its output
    return F.relu(x) if kernel == 'relu' else x.softmax(dim=-1)


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
    count = q.new_tensor(q.shape[2], dtype=wide) if real is None else real.sum(dim=2, keepdim=True)
    if weight_scale is not None:
        query = (q if real is None else q * real).sum(dim=2, keepdim=True, dtype=wide) / count
        logits = (k @ query.to(k.dtype).transpose(-1, -2)).to(wide) * weight_scale  # (B, heads, N, 1)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, :, None], float('-inf'))
        weight = logits.softmax(dim=2)
    else:
        weight = (q.new_ones(1, 1, q.shape[2], 1, dtype=wide) if real is None else real) / count
    key_mean = (k.transpose(-1, -2).to(wide) @ weight).to(q.dtype)  # sum_j a_j k_j / N, (B, heads, d, 1)
    normaliser = (q @ key_mean).to(wide) + eps
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N leaves the range of float16; its root on each factor does not
        k, v = (k * count.rsqrt()).to(q.dtype), (v * (weight * count.sqrt())).to(q.dtype)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return ((q @ (k.transpose(-1, -2) @ v)) / normaliser).to(v.dtype)


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
    wide = accumulation_dtype(q)
    if mask is None:
        count = q.new_tensor(k.shape[2], dtype=wide)
    else:
        k = k * mask[:, None, :, None].to(k.dtype)
        count = mask.sum(dim=1, dtype=wide).clamp(min=1)[:, None, None, None]
    key_mean = k.sum(dim=2, keepdim=True, dtype=wide) / count
    normaliser = (q @ key_mean.to(q.dtype).transpose(-1, -2)).to(wide) + eps
    if wide == q.dtype:
        state = k.transpose(-1, -2) @ v / count
    else:
        root = count.rsqrt()  # 1/N leaves the range of float16; its root on each factor does not
        state = (k * root).to(q.dtype).transpose(-1, -2) @ (v * root).to(q.dtype)
    return ((q @ state) / normaliser).to(v.dtype)


def inline_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Optional[Tensor] = None) -> Tensor:
    """Injective linear attention (InLine Eq. 3-5), O(N d^2).

    The weights ``(scale q_i . (k_j - mean(k)) + 1) / N`` sum to 1 without a division, so
    ``out_i = mean(v) + scale q_i cov(k, v)``: one small state, one pass over the queries.

    Args:
        q, k (Tensor): Mapped queries (B, heads, N, d) and keys (B, heads, M, d).
        v (Tensor): Values, (B, heads, M, e); zero where ``mask`` is False.
        scale (float): ``d ** -0.5`` in the release.
        mask (Tensor, optional): (B, M) bool, True for real tokens.

    Returns:
        Tensor: (B, heads, N, e), in the dtype of ``v``.
    """
    wide = accumulation_dtype(q)
    if mask is None:
        count = q.new_tensor(k.shape[2], dtype=wide)
    else:
        k = k * mask[:, None, :, None].to(k.dtype)
        count = mask.sum(dim=1, dtype=wide).clamp(min=1)[:, None, None, None]
    key_mean = k.sum(dim=2, keepdim=True, dtype=wide) / count
    value_mean = v.sum(dim=2, keepdim=True, dtype=wide) / count
    if wide == q.dtype:
        covariance = k.transpose(-1, -2) @ (v * (scale / count)) - key_mean.transpose(-1, -2) * (value_mean * scale)
    else:
        # centred before the product: the difference of two rounded products would lose what half precision has left
        root = count.rsqrt()
        centred = ((k - key_mean) * root).to(q.dtype)
        covariance = centred.transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return (q @ covariance.to(q.dtype) + value_mean.to(q.dtype)).to(v.dtype)


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
        Tensor: As ``x``.
    """
    wide = accumulation_dtype(x)
    r = (F.relu(x.to(wide)) + eps) * inverse_scale.to(wide)
    norm = r.norm(dim=-1, keepdim=True)
    # the map is homogeneous of degree one, so its argument may be scaled: large powers then stay below one
    base = r / r.amax(dim=-1, keepdim=True) if power > 4 else r
    focused = base**power
    return (focused * (norm / focused.norm(dim=-1, keepdim=True))).to(x.dtype)
