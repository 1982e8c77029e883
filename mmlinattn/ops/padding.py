# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Token counts, means and biases for inputs with padded tokens."""

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
    """Return the number of real tokens of (..., B, heads, N, d), at least 1: N, or (B, 1, 1, 1) with a mask."""
    if mask is None:
        count: Any = x.shape[-2]
        if isinstance(count, Tensor):  # in torch.jit.trace; the root of an int tensor would have the default dtype
            return count.to(accumulation_dtype(x))
        return max(count, 1) if is_known(count) else count
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


# cache of count_tokens for the last mask: the blocks of a stage share one mask
_last_count: tuple[Callable, Any, Any] = (lambda: None, None, None)


def inverse_sqrt(count: TokenCount) -> Union[float, Tensor]:
    """Return ``count ** -0.5``. 1 / N underflows in float16, so each of two factors is scaled by its square root."""
    return count**-0.5


def token_mean(x: Tensor, mask: Optional[Tensor], count: TokenCount) -> Tensor:
    """Mean over the real tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better."""
    wide = accumulation_dtype(x)
    if mask is None:
        return x.sum(dim=-2, keepdim=True, dtype=wide) / count
    if dispatch.on_cpu(x):  # a matmul with the mask sums the real tokens without a masked copy
        return (mask[:, None, None].to(wide) @ x.to(wide)) / count
    return (x * mask[:, None, :, None]).sum(dim=-2, keepdim=True, dtype=wide) / count


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """Return ``eps``, or with a mask a tensor (B, 1, 1, 1): ``eps``, plus 1 for items that consist of padding alone.

    Keys and values of such an item sum to zero, so its result is zero for every divisor. A divisor of 1 keeps queries
    and gradients in range; ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


def masked_logit(dtype: torch.dtype) -> float:
    """Return the logit that hides a key: its exponential is 0 beside any real key. It is finite, so that the softmax
    over hidden keys alone (all padding) is finite too."""
    return torch.finfo(dtype).min / 4


def masked_bias(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """Return ``bias`` in the type of ``like``, plus large negative logits for keys that ``mask`` (B, M) hides. Without
    bias and mask the result is None."""
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        return hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)
