# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels: two passes over the tokens forward, two backward; see :mod:`.triton_kernels`."""

from typing import Optional

from torch import Tensor

from . import reference
from .triton_launch import KERNELS, Attention
from .triton_op import register


def _plain(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return reference.linear_attention(q, k, v, spec.heads, spec.kernel, mask, spec.eps)


_run = register('linear_attention', _plain)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
    eps: float = 1e-6,
) -> Tensor:
    """See :func:`mmlinattn.ops.linear_attention`."""
    if kernel not in KERNELS:
        return reference.linear_attention(q, k, v, num_heads, kernel, mask, eps)
    return _run(Attention(num_heads, kernel, eps=eps), q, k, v, mask=mask)
