# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Counts, means and guards of tokens of which some are padding."""

from typing import Optional, Union

import torch
from torch import Tensor

from .dispatch import accumulation_dtype

# Sizes enter as numbers and never as tensors made from them, so that a recorded graph keeps them free.
Count = Union[int, Tensor]


def count_tokens(x: Tensor, mask: Optional[Tensor]) -> Count:
    """Number of real tokens of (..., B, heads, N, d): N, or (B, 1, 1, 1) with a mask, at least 1."""
    if mask is None:
        return x.shape[-2]
    return mask.sum(dim=1)[:, None, None, None].clamp(min=1).to(accumulation_dtype(x))


def divisor(count: Count) -> Union[float, Tensor]:
    """``count ** -0.5``: 1 / N leaves the range of float16, its root on each of two factors does not."""
    return count**-0.5


def token_mean(x: Tensor, mask: Optional[Tensor], count: Count) -> Tensor:
    """Mean over the real tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better."""
    wide = accumulation_dtype(x)
    if mask is None:
        return x.sum(dim=-2, keepdim=True, dtype=wide) / count
    # a product with the mask is a masked sum without a masked copy
    return (mask[:, None, None].to(wide) @ x.to(wide)) / count


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """``eps``, or (B, 1, 1, 1) with 1 more for items that consist of padding alone.

    Their sum of keys is zero. So are their values, and the result is zero whatever the divisor; 1 keeps queries and
    gradients in range, which a division by ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)
