# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels: means and covariance in one pass over keys and values, then one pass over the queries; as many backward.
See :mod:`..linear_attention.triton_kernels`."""

from typing import Optional

from torch import Tensor

from ..linear_attention.triton_launch import KERNELS, Attention
from ..linear_attention.triton_op import register
from . import reference


def _plain(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return reference.inline_attention(q, k, v, spec.heads, spec.scale, spec.kernel, mask)


_run = register('inline_attention', _plain)


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    scale: float,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
) -> Tensor:
    """See :func:`mmlinattn.ops.inline_attention`."""
    if kernel not in KERNELS:
        return reference.inline_attention(q, k, v, num_heads, scale, kernel, mask)
    return _run(Attention(num_heads, kernel, centred=True, scale=scale), q, k, v, mask=mask)
