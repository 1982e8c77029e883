# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Quadratic twins of the attentions in ``mmlinattn.ops``, written from the papers' equations.

Each builds its N x N map A literally, (B, heads, N, N) with ``out = A v``. Everything takes
(B, heads, N, d) tensors; use float64.
"""

import math

import torch


def side_by_side(x):
    """(B, heads, N, d) -> (B, N, heads * d), as the ops take it."""
    return x.transpose(1, 2).flatten(2)


def by_head(x, heads):
    """(B, N, heads * d) -> (B, heads, N, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def turn(x, height, width, base=10000.0):
    """The released rotary encoding, spelled out with complex numbers.

    Channel pair c of d / 2 is the complex number ``x[2c] + i x[2c + 1]``. The first half of the
    pairs turns with the row, the second with the column, pair c of a half by
    ``base ** -(c / (d / 4 - 1))`` radians a token. Returns complex (B, heads, N, d / 2).
    """
    quarter = x.shape[-1] // 4
    speed = base ** -(torch.arange(quarter, dtype=x.dtype) / max(quarter - 1, 1))
    rows, columns = (torch.arange(size, dtype=x.dtype) for size in (height, width))
    angles = (torch.cartesian_prod(rows, columns)[..., None] * speed).flatten(1)
    return torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)


def similarity(q, k, size=None):
    """``q_i . k_j`` (B, heads, N, N); of turned tokens where ``size`` = (height, width)."""
    if size is None:
        return torch.einsum('bhid,bhjd->bhij', q, k)
    # the dot product of two vectors of pairs is the real part of one with the other's conjugate
    return torch.einsum('bhic,bhjc->bhij', turn(q, *size), turn(k, *size).conj()).real


def kernel(x, name):
    """kappa of RALA Tab. 9."""
    if name == 'relu':
        return x.clamp(min=0)
    if name == 'softmax':
        return x.exp() / x.exp().sum(dim=-1, keepdim=True)
    return torch.where(x > 0, x, x.exp() - 1) + 1  # ELU + 1


def rala_map(q, k, size=None, weight_scale=1.0, eps=1e-6):
    """Attention map of RALA, Eq. 2-4.

    ``A_ij = a_j (R_i q_i) . (R_j k_j) / N / (q_i . mean_j(a_j k_j) + eps)``, where
    ``a_j = N exp(q_g . k_j s) / sum_m exp(q_g . k_m s)`` with the global query
    ``q_g = mean_i q_i``; all a_j are one for ``s = None``.
    """
    tokens = q.shape[2]
    if weight_scale is None:
        a = torch.ones_like(k[..., 0])
    else:
        global_query = sum(q[:, :, i] for i in range(tokens)) / tokens
        score = torch.einsum('bhd,bhjd->bhj', global_query, k).mul(weight_scale).exp()
        a = tokens * score / score.sum(dim=-1, keepdim=True)
    keys = a[..., None] * k
    normaliser = similarity(q, keys).mean(dim=-1, keepdim=True) + eps
    return similarity(q, keys, size) / tokens / normaliser


def softmax_map(q, k, size=None, bias=None):
    """``A_ij = exp(s_ij) / sum_m exp(s_im)``, ``s_ij = (R_i q_i) . (R_j k_j) / sqrt(d) + b_ij``."""
    score = similarity(q, k, size) / math.sqrt(q.shape[-1])
    score = (score if bias is None else score + bias).exp()
    return score / score.sum(dim=-1, keepdim=True)


def local_term(v, weight, bias, height, width):
    """Depth-wise convolution of the values (B, N, C) over the grid; zero padding."""
    image = v.unflatten(1, (height, width)).permute(0, 3, 1, 2)
    out = torch.nn.functional.conv2d(image, weight, None, padding=weight.shape[-1] // 2, groups=len(weight))
    return out.flatten(2).transpose(1, 2) + bias


def inline_map(q, k, scale):
    """Attention map of InLine, Eq. 3-5, on mapped queries and keys.

    ``A_ij = s q_i . k_j / N - mean_m(s q_i . k_m) / N + 1 / N``: rows sum to one without a division.
    """
    score = similarity(q, k) * scale / k.shape[2]
    return score - score.mean(dim=-1, keepdim=True) + 1 / k.shape[2]


def linear_map(q, k, eps=1e-6):
    """Plain linear attention on mapped queries and keys (InLine Eq. 2): ``A_ij = q_i . k_j / sum_m(q_i . k_m)``,
    ``eps`` added to the mean over the keys."""
    score = similarity(q, k)
    return score / k.shape[2] / (score.mean(dim=-1, keepdim=True) + eps)


def inline_kernel(x, name):
    """phi of InLine."""
    if name == 'relu':
        return x.clamp(min=0)
    if name == 'leakyrelu':
        return torch.where(x > 0, x, 0.01 * x)
    return (0.2 * x).exp() if name == 'exp' else x


def focused(x, scale, power, eps=1e-6):
    """phi_p of FLatten, Eq. 7-8, over all channels of (..., C)."""
    r = (x.clamp(min=0) + eps) / torch.log1p(scale.exp())
    powered = torch.stack([r[..., i] ** power for i in range(r.shape[-1])], dim=-1)
    length = r.square().sum(dim=-1, keepdim=True).sqrt()
    return length / powered.square().sum(dim=-1, keepdim=True).sqrt() * powered


def predicted_kernels(mean, fc1, fc2, heads):
    """3x3 kernels (B, C, 1, 3, 3) of InLine Eq. 6, head by head from the mean token (B, C)."""
    parts = []
    for head, token in enumerate(mean.chunk(heads, dim=1)):
        first, second = (
            (layer.weight.chunk(heads)[head][..., 0], layer.bias.chunk(heads)[head]) for layer in (fc1, fc2)
        )
        hidden = token @ first[0].T + first[1]
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
        parts.append((hidden @ second[0].T + second[1]).reshape(len(mean), -1, 3, 3))
    return torch.cat(parts, dim=1).unsqueeze(2)


def hallucinated_maps(real, steps, size, prefix=0):
    """Logits of the hallucinated heads (hMHSA Eq. 2) from those of the real ones, (B, heads, N, M).

    ``steps`` are pairs of ``'ihh'`` or ``'chh'`` and the convolution (weight, bias). IHH goes over the keys' grid,
    ``size``, query by query. Keys of class tokens have no neighbours. Biases are added to all keys.
    """
    maps = real
    for name, (weight, bias) in steps:
        if name == 'chh':
            maps = torch.einsum('mi,binj->bmnj', weight[:, :, 0, 0], maps)
            maps = maps if bias is None else maps + bias[:, None, None]
            continue
        queries = maps.transpose(1, 2).flatten(0, 1)[..., prefix:].unflatten(2, size)
        patches = torch.nn.functional.conv2d(queries, weight, None, padding=1, groups=len(weight))
        patches = patches.unflatten(0, (len(maps), -1)).transpose(1, 2).flatten(3)
        maps = torch.cat((maps[..., :prefix], patches), dim=-1) + bias[:, None, None]
    return maps
