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
        if x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling():
            return _ELUPlusOne.apply(x)
        return F.elu(x).add_(1)  # the backward pass of ELU reads its input, not its output
    return F.relu(x) if kernel == 'relu' else x.softmax(dim=-1)


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
    q = (q / normaliser).to(q.dtype)  # dividing the result instead would keep one map more for the backward pass
    if wide == q.dtype:
        v = v * weight
    else:
        # 1/N leaves the range of float16; its root on each factor does not
        k, v = (k * count.rsqrt()).to(q.dtype), (v * (weight * count.sqrt())).to(q.dtype)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return q @ (k.transpose(-1, -2) @ v)


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
    normaliser = (q @ key_mean.to(q.dtype).transpose(-1, -2)).to(count.dtype) + eps
    if count.dtype == q.dtype:
        state = (k.transpose(-1, -2) @ v) / count  # padded values are zero, so padded keys do not matter
    else:
        root = count.rsqrt()  # 1/N leaves the range of float16; its root on each factor does not
        state = (k * root).to(q.dtype).transpose(-1, -2) @ (v * root).to(q.dtype)
    out = q @ state
    # the backward pass of a division reads what was divided; in inference it is overwritten
    return (out / normaliser if out.requires_grad else out.div_(normaliser)).to(v.dtype)


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
    count, (key_mean, value_mean) = token_means(mask, k, k, v)
    if count.dtype == q.dtype:
        covariance = (k.transpose(-1, -2) @ v) * (scale / count) - key_mean.transpose(-1, -2) * (value_mean * scale)
    else:
        # centred before the product: the difference of two rounded products would lose what half precision has left
        root = count.rsqrt()
        centred = ((k - key_mean) * root).to(q.dtype)
        covariance = centred.transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return (q @ covariance.to(q.dtype)).add_(value_mean.to(q.dtype)).to(v.dtype)


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
    if not torch.compiler.is_compiling():
        return _FocusedMap.apply(x, inverse_scale, power, eps)
    # compilers fuse the plain form
    wide = accumulation_dtype(x)
    r = (F.relu(x).to(wide) + eps) * inverse_scale.to(wide)
    # homogeneous of degree one: a token may be scaled so that its powers neither over- nor underflow
    powered = (r / r.amax(dim=-1, keepdim=True).detach()) ** power
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (r, powered)]
    return powered * (lengths[0] / lengths[1])


class _FocusedMap(torch.autograd.Function):
    """:func:`focused_map` in one pass over the memory each way, saving nothing but its input.

    A dozen operations make the map. On CPUs they run on blocks of tokens that stay in the cache from the first to the
    last; in one go, each would fetch and write the whole tensor.
    """

    @staticmethod
    def blocks(*tensors: Tensor):
        """Rows of (..., C) tensors, some at a time."""
        rows = [t.flatten(0, -2) for t in tensors]
        size = max(len(rows[0]), 1)
        if tensors[0].device.type == 'cpu':
            # 2^15 elements a thread: below it PyTorch uses one thread only, far above it they leave the cache
            size = max(1, (torch.get_num_threads() << 15) // tensors[0].shape[-1])
        return zip(*(t.split(size) for t in rows))

    @staticmethod
    def focus(x: Tensor, inverse_scale: Tensor, power: float, eps: float, out: Tensor) -> tuple[Tensor, Tensor]:
        """Write the map of some tokens to ``out``; return r and |r|."""
        r = torch.addcmul(inverse_scale * eps, F.relu(x).to(out.dtype), inverse_scale)
        norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
        # homogeneous of degree one: a token may be scaled so that its powers neither over- nor underflow. Its norm is
        # at hand; the largest component of a unit vector is at least C ** -0.5, too little for high powers
        size = norm if power <= 6 else r.amax(dim=-1, keepdim=True)
        torch.mul(r, size.reciprocal(), out=out).pow_(power)
        out.mul_(norm / torch.linalg.vector_norm(out, dim=-1, keepdim=True))
        return r, norm

    @staticmethod
    def forward(ctx, x, inverse_scale, power, eps):
        ctx.save_for_backward(x, inverse_scale)
        ctx.power, ctx.eps = power, eps
        wide = accumulation_dtype(x)
        scale = inverse_scale.to(wide)
        result = torch.empty(x.shape, dtype=wide, device=x.device)
        for part, target in _FocusedMap.blocks(x, result):
            _FocusedMap.focus(part, scale, power, eps, target)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # y = |r| / |r^p| r^p:  dL/dr = (g.y) r / |r|^2 + p y / r (g - (g.y) y / |r|^2)
        x, inverse_scale = ctx.saved_tensors
        wide = accumulation_dtype(x)
        scale = inverse_scale.to(wide)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_scale = torch.zeros_like(scale)
        for part, g, target in _FocusedMap.blocks(x, grad, grad_x):
            y = torch.empty_like(part, dtype=wide, memory_format=torch.contiguous_format)
            r, norm = _FocusedMap.focus(part, scale, ctx.power, ctx.eps, y)
            along = torch.linalg.vecdot(g, y).unsqueeze(-1) / norm.square()
            inner = torch.addcmul(g, along, y, value=-1)
            grad_r = y.div_(r).mul_(inner).mul_(ctx.power).addcmul_(along, r)
            grad_scale += r.mul_(grad_r).sum(dim=0)
            target.copy_(grad_r.mul_(scale).masked_fill_(part <= 0, 0))
        return grad_x, (grad_scale / scale).to(inverse_scale.dtype), None, None
