# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Counts, means and biases of padded tokens."""

import weakref
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import dispatch
from .dtypes import accumulation_dtype
from .sizes import is_known

# Sizes enter as numbers and never as tensors made from them, so that a recorded graph keeps them free.
TokenCount = Union[int, Tensor]


def count_tokens(x: Tensor, mask: Optional[Tensor]) -> TokenCount:
    """Number of real tokens of (..., B, heads, N, d): N, or (B, 1, 1, 1) with a mask, at least 1."""
    if mask is None:
        count: Any = x.shape[-2]
        if isinstance(count, Tensor):  # by torch.jit.trace; the root of an int would be of the default type
            return count.to(accumulation_dtype(x))
        return max(count, 1) if dispatch.state.settled or is_known(count) else count
    global _last_count
    wide = accumulation_dtype(x)
    if dispatch.needs_reference(mask):
        return _count(mask, wide)
    found, dtype, count = _last_count
    if found() is not mask or dtype != wide:
        count = _count(mask, wide)
        _last_count = weakref.ref(mask), wide, count
    return count


def _count(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.sum(dim=1)[:, None, None, None].clamp(min=1).to(dtype)


# of the last mask: the blocks of a stage share one
_last_count: tuple[Callable, Any, Any] = (lambda: None, None, None)


def inverse_sqrt(count: TokenCount) -> Union[float, Tensor]:
    """Return ``count ** -0.5``: 1 / N leaves the range of float16, its root on each of two factors does not."""
    return count**-0.5


def token_mean(x: Tensor, mask: Optional[Tensor], count: TokenCount) -> Tensor:
    """Mean over the real tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better."""
    wide = accumulation_dtype(x)
    if mask is None:
        return x.sum(dim=-2, keepdim=True, dtype=wide) / count
    if dispatch.on_cpu(x):  # a product with the mask is a masked sum without a masked copy
        return (mask[:, None, None].to(wide) @ x.to(wide)) / count
    return (x * mask[:, None, :, None]).sum(dim=-2, keepdim=True, dtype=wide) / count


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """``eps``, or (B, 1, 1, 1) with 1 more for items that consist of padding alone.

    Their sum of keys is zero. So are their values, and the result is zero for every divisor; 1 keeps queries and
    gradients in range; a division by ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


def masked_logit(dtype: torch.dtype) -> float:
    """The logit that hides a key: exp of it is 0 beside any real key. It is finite so that a row of hidden keys alone
    (all padding) stays so."""
    return torch.finfo(dtype).min / 4


def masked_bias(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """``bias`` in the type of ``like``, plus the large negative logits of keys outside of ``mask`` (B, M)."""
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        return hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)
