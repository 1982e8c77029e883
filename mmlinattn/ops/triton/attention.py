# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The linear attentions by GPU kernels, with the signatures of :mod:`mmlinattn.ops`.

Two passes over the tokens forward, two backward; RALA three and three (the mean query, and its gradient, first),
focused attention one more for its norms over all channels. See :mod:`.attention_kernels`.
"""

from typing import Optional

from torch import Tensor

from ..focused import focused_attention_reference
from ..inline import inline_attention_reference
from ..plain_linear import linear_attention_reference
from ..rank_augmented import rala_reference
from .attention_launch import KERNELS, WIDEST_TOKEN, Attention, rows_first
from .attention_op import register


def _rala(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    weight_scale = spec.scale if spec.weighted else None
    return rala_reference(q, k, v, spec.heads, spec.kernel, rotary, mask, weight_scale, spec.eps)


def _inline_attention(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return inline_attention_reference(q, k, v, spec.heads, spec.scale, spec.kernel, mask)


def _linear_attention(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return linear_attention_reference(q, k, v, spec.heads, spec.kernel, mask, spec.eps)


def _focused_attention(spec: Attention, q, k, v, rotary, mask, offset, scale) -> Tensor:
    return focused_attention_reference(q, k, v, spec.heads, scale, spec.power, offset, mask, spec.eps)


_run_rala = register('rala', _rala)
_run_inline_attention = register('inline_attention', _inline_attention)
_run_linear_attention = register('linear_attention', _linear_attention)
_run_focused_attention = register('focused_attention', _focused_attention)


def rala(
    q, k, v, num_heads, kernel='elu', rotary=None, mask=None, weight_scale: Optional[float] = 1.0, eps=1e-6
) -> Tensor:
    learns_rotary = rotary is not None and rotary.requires_grad
    if kernel not in KERNELS or q.shape[:2] != k.shape[:2] or learns_rotary:
        return rala_reference(q, k, v, num_heads, kernel, rotary, mask, weight_scale, eps)
    weighted = weight_scale is not None
    spec = Attention(num_heads, kernel, weighted=weighted, scale=weight_scale if weighted else 1.0, eps=eps)
    out = _run_rala(spec, q, k, v, rotary, mask)
    return out if out.dtype == v.dtype else out.to(v.dtype)


def inline_attention(q, k, v, num_heads, scale, kernel='identity', mask=None) -> Tensor:
    if kernel not in KERNELS:
        return inline_attention_reference(q, k, v, num_heads, scale, kernel, mask)
    return _run_inline_attention(Attention(num_heads, kernel, centred=True, scale=scale), q, k, v, mask=mask)


def linear_attention(q, k, v, num_heads, kernel='identity', mask=None, eps=1e-6) -> Tensor:
    if kernel not in KERNELS:
        return linear_attention_reference(q, k, v, num_heads, kernel, mask, eps)
    return _run_linear_attention(Attention(num_heads, kernel, eps=eps), q, k, v, mask=mask)


def focused_attention(q, k, v, num_heads, inverse_scale, power, offset=None, mask=None, eps=1e-6) -> Tensor:
    if eps <= 0 or power < 1 or max(q.shape[-1], k.shape[-1]) > WIDEST_TOKEN:
        return focused_attention_reference(q, k, v, num_heads, inverse_scale, power, offset, mask, eps)
    if offset is not None:
        if not _expands(offset, k):
            return focused_attention_reference(q, k, v, num_heads, inverse_scale, power, offset, mask, eps)
        offset = rows_first(offset.expand(k.shape))  # of stride 0 where it is shared by the images
    spec = Attention(num_heads, 'focused', eps=eps, power=power)
    return _run_focused_attention(spec, q, k, v, None, mask, offset, inverse_scale.contiguous())


def _expands(x: Tensor, like: Tensor) -> bool:
    """Whether ``x`` broadcasts to the shape of ``like``."""
    sizes = zip(reversed(x.shape), reversed(like.shape))
    return x.dim() <= like.dim() and all(size in (1, whole) for size, whole in sizes)
