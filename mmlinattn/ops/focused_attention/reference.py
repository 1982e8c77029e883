# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import accumulation_dtype
from ..linear_attention.reference import linear_attention


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
    k = k if offset is None else k + offset.to(k.dtype)
    q, k = (focused_map(t, inverse_scale, power, eps) for t in (q, k))
    return linear_attention(q, k, v.to(q.dtype), num_heads, mask=mask, eps=eps).to(v.dtype)


def focused_map(x: Tensor, inverse_scale: Tensor, power: float, eps: float = 1e-6) -> Tensor:
    """``phi_p`` of (..., C) tokens, in float32 for half precision."""
    wide = accumulation_dtype(x)
    r = (F.relu(x).to(wide) + eps) * inverse_scale.to(wide)
    peak, floor = power_range(wide, power)
    powered = (r * (peak / r.amax(dim=-1, keepdim=True).detach())).clamp(min=floor) ** power
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (r, powered)]
    return powered * (lengths[0] / lengths[1])


def power_range(dtype: torch.dtype, power: float) -> tuple[float, float]:
    """Between which numbers the components of a token lie before the power is taken.

    The map is homogeneous of degree one, so a token may be scaled at will: its largest component becomes the first
    number returned. Smaller ones stop at the second, whose power is 1e-24 of the largest in float32 (1e-150 in
    float64), far below what rounding leaves of a sum with it. Then neither the powers, nor their squares, nor the
    products of such queries and keys overflow, or come to lie where numbers lose digits (denormal ones), with which
    many CPUs compute a hundred times more slowly.
    """
    reach = 75.0 if dtype == torch.float64 else 12.0
    return 10 ** (reach / power), 10 ** (-reach / power)
