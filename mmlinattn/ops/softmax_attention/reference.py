# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from .. import forms


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """The attention of (B, heads, N, d) tensors."""
    if forms.is_transformed():  # PyTorch's fused kernels have no forward-mode derivatives
        return equation(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def equation(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """:func:`attend` with its map of all pairs, which can be differentiated as often and in any way."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v
