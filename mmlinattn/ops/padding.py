# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Token counts, means and biases for inputs with padded tokens."""

from typing import Optional, Union

import torch
from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype

TokenCount = Union[int, Tensor]


def count_tokens(x: Tensor, mask: Optional[Tensor]) -> TokenCount:
    """Return the number of valid tokens of (B, heads, N, d) in eager mode, at least 1: N, or (B, 1, 1, 1) with a mask.

    Reference implementations use :func:`root_weights` instead, as graphs in float16 cannot hold large counts.
    """
    if mask is None:
        return max(x.shape[-2], 1)
    count = getattr(mask, 'token_count', None)
    return (_count(mask) if count is None else count).to(accumulation_dtype(x))


def keep_count(mask: Optional[Tensor]) -> Optional[Tensor]:
    """Store the token count of ``mask`` as its attribute, shared by all blocks of a stage. Nobody may write to it."""
    if mask is not None and not dispatch.needs_reference(mask):
        mask.token_count = _count(mask)  # type: ignore[attr-defined]
    return mask


def _count(mask: Tensor) -> Tensor:
    return mask.sum(dim=1, dtype=torch.float32)[:, None, None, None].clamp_(min=1)


def root_weights(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Return square roots of equal weights of the valid tokens, 0 for padding: (..., N, 1) with squares that sum to 1.

    Reference implementations multiply both factors of a sum over tokens by them. In float16, N overflows from 65,520
    tokens on, and 1 / N is subnormal from 16,385 on. Tokens are counted in units of 256, so intermediate results stay
    in range.
    """
    valid = torch.ones_like(x[:1, ..., :1]) if mask is None else mask[:, None, :, None]
    valid = valid.to(accumulation_dtype(x)) / 16
    return valid / (valid * valid).sum(dim=-2, keepdim=True).clamp(min=1 / 256).sqrt()


def token_mean(x: Tensor, mask: Optional[Tensor], zero_padded: bool = False) -> Tensor:
    """Mean over the valid tokens, (..., B, heads, N, d) -> (..., B, heads, 1, d), in float32 or better.

    Args:
        mask (Tensor, optional): (B, N) bool, True for valid tokens.
        zero_padded (bool): Padded tokens are zero, so that the mask is needed for their number only.
    """
    wide = accumulation_dtype(x)
    if mask is None:
        return x.mean(dim=-2, keepdim=True, dtype=wide)
    if dispatch.needs_reference(x, mask):
        root = root_weights(x, mask)
        return root.transpose(-1, -2) @ (x * root)
    if dispatch.on_cpu(x):  # a matmul with the mask sums the valid tokens without a masked copy
        return (mask[:, None, None].to(wide) @ x.to(wide)) / count_tokens(x, mask)
    x = x if zero_padded else x * mask[:, None, :, None]
    return x.sum(dim=-2, keepdim=True, dtype=wide) / count_tokens(x, mask)


def padded_eps(eps: float, mask: Optional[Tensor], dtype: torch.dtype) -> Union[float, Tensor]:
    """Return ``eps``, or with a mask a tensor (B, 1, 1, 1): ``eps``, plus 1 for items that consist of padding alone.

    Keys and values of such an item sum to zero, so its result is zero for every divisor. A divisor of 1 keeps queries
    and gradients in range; ``eps`` alone would not.
    """
    return eps if mask is None else eps + (~mask.any(dim=1))[:, None, None, None].to(dtype)


def masked_logit(dtype: torch.dtype) -> float:
    """Return the logit that hides a key: its exponential is 0 beside any valid key. It is finite, so that the softmax
    over hidden keys alone (all padding) is finite too."""
    return torch.finfo(dtype).min / 4


def masked_bias(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """Return ``bias`` in the type of ``like``, plus large negative logits for keys that ``mask`` (B, M) hides. Without
    bias and mask the result is None."""
    if mask is not None:
        hidden = like.new_zeros(mask.shape)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        return hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)
