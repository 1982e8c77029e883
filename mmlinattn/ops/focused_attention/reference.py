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
    # Homogeneous of degree one: a token may be scaled at will, and its largest component becomes 1.
    part = r / r.amax(dim=-1, keepdim=True).detach()
    # F.threshold, which exporters do not all know
    powered = part.masked_fill(part <= smallest_base(wide, power), 0.0) ** power
    lengths = [torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (r, powered)]
    return powered * (lengths[0] / lengths[1])


def smallest_base(dtype: torch.dtype, power: float) -> float:
    """Which part of its largest component a component of a token has to exceed; the power of smaller ones counts as 0.

    That power is 1e-15 in float32 (1e-75 in float64), far below what rounding leaves of a sum with 1. Without the bound
    the powers, their squares, or their products with each other and with gradients would come to lie where numbers lose
    digits (denormal ones), with which many CPUs compute a hundred times more slowly.
    """
    return 10 ** ((-75.0 if dtype == torch.float64 else -15.0) / power)
