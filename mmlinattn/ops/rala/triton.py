# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels: three passes over tokens forward (the mean query first), three backward (the gradient of the mean query
before that of the queries); see :mod:`..linear_attention.triton_kernels`."""

from typing import Optional

from torch import Tensor

from ..linear_attention.triton_launch import KERNELS, Attention
from ..linear_attention.triton_op import register
from . import reference


def _plain(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    weight_scale = spec.scale if spec.weighted else None
    return reference.rala(q, k, v, spec.heads, spec.kernel, rotary, mask, weight_scale, spec.eps)


_run = register('rala', _plain)


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
    """See :func:`mmlinattn.ops.rala`."""
    learns_rotary = rotary is not None and rotary.requires_grad
    if kernel not in KERNELS or q.shape[1] != k.shape[1] or learns_rotary:
        return reference.rala(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
    weighted = weight_scale is not None
    spec = Attention(num_heads, kernel, weighted=weighted, scale=weight_scale if weighted else 1.0, eps=eps)
    return _run(spec, q, k, v, rotary, mask)
