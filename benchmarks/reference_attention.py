# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Reference implementations of InLine and focused linear attention for benchmarks.

Each factor of an equation is one tensor, and each term is one pass over the tokens.
"""

import torch.nn.functional as F


def inline(q, k, v, scale):
    """Compute InLine Eq. 3-5 in three passes over the queries. All tensors are (B, heads, N, d), and ``scale``
    multiplies the products."""
    tokens = k.shape[2]
    state = (k.transpose(-1, -2) * (scale / tokens) ** 0.5) @ (v * (scale / tokens) ** 0.5)
    rest = 1 - q @ k.mean(dim=2, keepdim=True).transpose(-1, -2) * scale
    return q @ state + rest * v.mean(dim=2, keepdim=True)


def focused_map(x, scale, power):
    """Map queries or keys (B, N, C) by FLatten Eq. 7-8."""
    x = (F.relu(x) + 1e-6) / scale
    norm = x.norm(dim=-1, keepdim=True)
    x = x**power
    return x / x.norm(dim=-1, keepdim=True) * norm


def linear(q, k, v):
    """Compute FLatten Eq. 4 on mapped queries and keys. All tensors are (B, heads, N, d)."""
    tokens = k.shape[2]
    normaliser = 1 / (q @ k.mean(dim=2, keepdim=True).transpose(-1, -2) + 1e-6)
    state = (k.transpose(-1, -2) * tokens**-0.5) @ (v * tokens**-0.5)
    return q @ state * normaliser


def focused(q, k, v, scale, power, heads):
    """Compute FLatten's attention of (B, N, C) tokens without its depth-wise term. ``scale`` (C,) is the parameter
    before softplus."""
    scale = F.softplus(scale)
    q, k = focused_map(q, scale, power), focused_map(k, scale, power)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for t in (q, k, v))
    return linear(q, k, v).transpose(1, 2).flatten(2)
