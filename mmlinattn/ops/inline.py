# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any, Optional

import torch
from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype
from .feature_maps import feature_map
from .tensors import (
    blocks,
    count_tokens,
    divisor,
    first_order,
    gradients_like,
    heads_of,
    merge_heads,
    product,
    split_heads,
    token_mean,
    tokens_of,
)


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    scale: float,
    kernel: str = 'identity',
    mask: Optional[Tensor] = None,
) -> Tensor:
    """Injective linear attention (InLine Eq. 3-5), O(N d^2) for each head.

    The weights ``(scale q_i . (k_j - mean(k)) + 1) / N`` of mapped queries and keys sum to 1 without a division, so
    ``out_i = mean(v) + scale q_i cov(k, v)``: one small state, one pass over the queries.

    In inference, ``q`` and ``k`` are scratch memory of this function; ``v`` never is.

    Args:
        q (Tensor): Queries before their feature map, (B, N, num_heads * d).
        k (Tensor): Keys before their feature map, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero where ``mask`` is False.
        num_heads (int): Heads that the channels are split into.
        scale (float): ``d ** -0.5`` in the release.
        kernel (str): The feature map, a name of :data:`~mmlinattn.ops.feature_maps.FEATURE_MAPS`.
        mask (Tensor, optional): (B, M) bool, True for real tokens.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.
    """
    arguments = (q, k, v, num_heads, scale, kernel, mask)
    with dispatch.without_autocast(q):
        backend = dispatch.backend(q, k, v)
        if backend != 'reference':
            dispatch.has_kernel('inline_attention', kernel, q, v, num_heads)  # to say that there is none
        return (_inline_attention_on_cpu if backend == 'cpu' else inline_attention_reference)(*arguments)


def inline_attention_reference(q, k, v, num_heads, scale, kernel='identity', mask=None) -> Tensor:
    dtype = v.dtype
    q, k, v = (heads_of(t, num_heads) for t in (q, k, v))
    if q.dtype == torch.float16:  # of small deviations from the mean, it would keep a digit
        q, k, v = (t.to(accumulation_dtype(t)) for t in (q, k, v))
    q, k = feature_map(q, kernel), feature_map(k, kernel)
    count = count_tokens(k, mask)
    key_mean, value_mean = token_mean(k, mask, count), token_mean(v, mask, count)
    root = divisor(count)
    # centred before the product: the difference of two rounded products would lose what half precision has left.
    # Padded keys do not matter, their values are zero.
    covariance = ((k - key_mean) * root).to(q.dtype).transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return tokens_of((q @ covariance + value_mean.to(q.dtype)).to(dtype))


def _inline_attention_on_cpu(q, k, v, num_heads, scale, kernel, mask) -> Tensor:
    wide, dtype = torch.promote_types(accumulation_dtype(q), accumulation_dtype(v)), v.dtype
    queries, keys, values = (split_heads(t.to(wide), num_heads) for t in (q, k, v))
    queries, keys = feature_map(queries, kernel), feature_map(keys, kernel)
    return merge_heads(_InLineAttention.apply(queries, keys, values, scale, mask)).to(dtype)


class _InLineAttention(torch.autograd.Function):
    """One product a tensor each way."""

    @staticmethod
    def forward(ctx: Any, q, k, v, scale, mask):
        count = count_tokens(k, mask)
        key_mean, value_mean = token_mean(k, mask, count), token_mean(v, mask, count)
        covariance = product(k.transpose(-1, -2), v).mul_(scale / count)
        covariance.addcmul_(key_mean.transpose(-1, -2), value_mean, value=-scale)
        ctx.save_for_backward(q, k, v, covariance, key_mean, value_mean, mask)
        ctx.scale, ctx.count = scale, count
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
        for images, rows in blocks(batch, tokens, heads * v.shape[-1]):
            torch.add(product(q[images, :, rows], covariance[images]), value_mean[images], out=out[images, :, rows])
        return out

    @first_order
    def backward(ctx: Any, grad):
        q, k, v, covariance, key_mean, value_mean, mask = ctx.saved_tensors
        each = grad.sum(dim=2, keepdim=True) / ctx.count  # mean(v) is part of every token's output
        inner = product(q.transpose(-1, -2), grad).mul_(ctx.scale / ctx.count)
        grads = grad_q, grad_k, grad_v = gradients_like(q, k, v)
        batch, heads, tokens, width = grad.shape
        turned = inner.transpose(-1, -2)
        key_shift, value_shift = value_mean @ turned, each - key_mean @ inner
        for images, rows in blocks(batch, tokens, heads * width):
            grad_q[images, :, rows] = product(grad[images, :, rows], covariance[images].transpose(-1, -2))
        for images, rows in blocks(batch, v.shape[2], heads * width):
            part = (images, slice(None), rows)
            torch.sub(product(v[part], turned[images]), key_shift[images], out=grad_k[part])
            torch.add(product(k[part], inner[images]), value_shift[images], out=grad_v[part])
        if mask is not None:
            for of_keys in (grad_k, grad_v):
                of_keys.mul_(mask[:, None, :, None])
        return *grads, None, None
