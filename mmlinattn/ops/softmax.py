# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .rotary import rotate_pair
from .tokens import is_known, masked_bias, merge_heads, split_heads


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    rotary: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
) -> Tensor:
    """Scaled dot-product attention, ``softmax(q k^T / sqrt(d) + bias) v``, by PyTorch's fused kernels.

    O(N M d) operations for each head in O(N + M) memory.

    Source: Vaswani et al. 2017, Eq. 1.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E).
        num_heads (int): Heads that the channels are split into.
        rotary (Tensor, optional): (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`; needs N = M.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.
        bias (Tensor, optional): Added to the logits, broadcastable to (B, heads, N, M), with four dimensions.

    Returns:
        Tensor: (B, N, E). For second derivatives, call it within
            ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.

    Raises:
        ValueError: If k and v differ in length: PyTorch's CPU kernel would read out of bounds.
    """
    if is_known(k.shape[1], v.shape[1]) and k.shape[1] != v.shape[1]:
        raise ValueError(f'k has {k.shape[1]} tokens and v {v.shape[1]}; allowed is one value for each key')
    if rotary is None:
        q, k = split_heads(q, num_heads), split_heads(k, num_heads)
    else:
        q, k = rotate_pair(q, k, rotary, num_heads)
    if mask is not None or bias is not None:
        bias = masked_bias(bias, mask, q)
        if bias is not None and dispatch.is_exported() and torch.onnx.is_in_onnx_export():
            # With a gradient of the bias, PyTorch's exporter records attention with other strides than it writes.
            bias = bias.detach()
    return merge_heads(attend(q, k, split_heads(v, num_heads), bias))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Compute ``softmax(q k^T / sqrt(d) + bias) v`` of (B, heads, N, d) tensors."""
    if dispatch.is_transformed():  # PyTorch's fused kernels have no forward-mode derivatives
        return equation(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def equation(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Compute :func:`attend` with an explicit map, differentiable any number of times, in reverse and forward mode."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v
