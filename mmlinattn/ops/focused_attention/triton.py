# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""GPU kernels: a pass over queries and keys for the norms over all channels, then as in linear attention; two passes
over each backward. See :mod:`..linear_attention.triton_kernels`."""

from typing import Optional

from torch import Tensor

from ..linear_attention.triton_launch import WIDEST_TOKEN, Attention, rows_first
from ..linear_attention.triton_op import register
from . import reference


def _plain(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return reference.focused_attention(q, k, v, spec.heads, scale, spec.power, offset, mask, spec.eps)


_run = register('focused_attention', _plain)


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
    """See :func:`mmlinattn.ops.focused_attention`."""
    if eps <= 0 or power < 1 or max(q.shape[-1], k.shape[-1]) > WIDEST_TOKEN:
        return reference.focused_attention(q, k, v, num_heads, inverse_scale, power, offset, mask, eps)
    if offset is not None:
        offset = rows_first(offset).expand(k.shape)  # of stride 0 where it is shared by the images
    spec = Attention(num_heads, 'focused', eps=eps, power=power)
    return _run(spec, q, k, v, None, mask, offset, inverse_scale.contiguous())
