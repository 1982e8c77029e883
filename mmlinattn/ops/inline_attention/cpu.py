# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One product a tensor each way, straight into memory where the heads of a token lie side by side."""

from typing import Optional

import torch
from torch import Tensor

from .. import forms
from ..kernels import kernel_map
from ..masks import count_tokens, token_mean
from ..memory import differentiable, gradients_like, merge_heads, product, split_heads
from . import reference


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    scale: float,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
) -> Tensor:
    if not q.dtype == k.dtype == v.dtype == forms.accumulation_dtype(q):
        return reference.inline_attention(q, k, v, num_heads, scale, kernel, mask)
    queries, keys, values = (split_heads(t, num_heads) for t in (q, k, v))
    queries, keys = kernel_map(queries, kernel), kernel_map(keys, kernel)
    return merge_heads(_InLineAttention.apply(queries, keys, values, scale, mask, not forms.records()))


class _InLineAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, mask, overwrite):
        count = count_tokens(k, mask)
        key_mean, value_mean = token_mean(k, mask, count), token_mean(v, mask, count)
        covariance = (k.transpose(-1, -2) @ v) * (scale / count) - key_mean.transpose(-1, -2) * (value_mean * scale)
        ctx.save_for_backward(q, k, v, covariance, key_mean, value_mean, mask)
        ctx.scale, ctx.count = scale, count
        ctx.plain = 3, lambda q, k, v: reference.attend(q, k, v, scale, mask)
        return product(q, covariance, value_mean, out=k if overwrite and k.shape == v.shape == q.shape else None)

    @differentiable
    def backward(ctx, grad):
        q, k, v, covariance, key_mean, value_mean, mask = ctx.saved_tensors
        each = grad.sum(dim=2, keepdim=True) / ctx.count  # mean(v) is part of every token's output
        inner = (q.transpose(-1, -2) @ grad) * (ctx.scale / ctx.count)
        grads = grad_q, grad_k, grad_v = gradients_like(q, k, v)
        product(grad, covariance.transpose(-1, -2), out=grad_q)
        product(v, inner.transpose(-1, -2), -value_mean @ inner.transpose(-1, -2), out=grad_k)
        product(k, inner, each - key_mean @ inner, out=grad_v)
        if mask is not None:
            for part in (grad_k, grad_v):
                part.mul_(mask[:, None, :, None])
        return *grads, None, None, None
