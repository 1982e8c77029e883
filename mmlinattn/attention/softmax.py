# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F

from .base import TOKEN_MIXERS, TokenMixer
from .functional import rotate


def masked_logit(dtype: torch.dtype) -> float:
    """What hides a key: exp of it is 0 beside any real key, and a row of hidden keys only (all padding) stays
    finite."""
    return torch.finfo(dtype).min / 4


@TOKEN_MIXERS.register_module('softmax')
class SoftmaxMixer(TokenMixer):
    """Scaled dot-product attention, ``softmax(q k^T / sqrt(d)) v``; no N x N map is built by hand.

    Source: Vaswani et al. 2017, Eq. 1; the baseline of all four papers and stages 3-4 of the released RAVLT.
    """

    quadratic = True
    rotary = True
    bias = True

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if mask is not None:
            hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            hidden = hidden.masked_fill(~mask, masked_logit(q.dtype))[:, None, None, :]
            bias = hidden if bias is None else bias.to(q.dtype) + hidden
        if bias is not None:
            bias = bias.to(q.dtype)
        return self.merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
