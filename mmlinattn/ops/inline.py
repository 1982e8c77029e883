# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional, Union

import torch
from torch import Tensor

from . import dispatch
from .dispatch import accumulation_dtype, product_dtype, with_gradient
from .linear import FEATURE_MAPS, IN_PLACE, check_kernel, write_map
from .tokens import (
    blocks,
    copy_heads,
    count_tokens,
    have_attention_shapes,
    merge_heads_5d,
    root_weights,
    split_heads,
    split_heads_5d,
    subtract,
    token_mean,
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

    The weights ``(scale q_i . (k_j - mean(k)) + 1) / M`` of mapped queries and keys sum to 1 without a division. So
    ``out_i = mean(v) + scale q_i cov(k, v)``, with one d x d covariance for all queries.

    Args:
        q (Tensor): Queries before their feature map, (B, N, num_heads * d).
        k (Tensor): Keys before their feature map, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E); zero for masked tokens.
        num_heads (int): Heads that the channels are split into.
        scale (float): ``d ** -0.5`` in the release.
        kernel (str): The feature map, a name of :data:`~mmlinattn.ops.linear.FEATURE_MAPS`.
        mask (Tensor, optional): (B, M) bool, True for valid tokens.

    Returns:
        Tensor: (B, N, E), in the dtype of ``v``.

    Raises:
        ValueError: For another ``kernel``.
    """
    check_kernel(kernel, FEATURE_MAPS)
    with dispatch.without_autocast(q):
        op = _attention if have_attention_shapes(q, k, v, num_heads) else _equation
        return op(q, k, v, mask, num_heads=num_heads, scale=scale, kernel=kernel)


def _equation(q, k, v, mask, num_heads, scale, kernel) -> Tensor:
    """Compute :func:`inline_attention` in operations that autograd records."""
    dtype = v.dtype
    q, k, v = (split_heads_5d(t, num_heads) for t in (q, k, v))
    if q.dtype == torch.float16:  # it would keep one digit of small deviations from the mean
        q, k, v = (t.to(accumulation_dtype(t)) for t in (q, k, v))
    q, k = map(FEATURE_MAPS[kernel], (q, k))
    key_mean, value_mean, root = token_mean(k, mask), token_mean(v, mask), root_weights(k, mask)
    # centred before the product: the difference of two rounded products would lose the last digits of half precision.
    # Padded keys do not matter, their values are zero.
    covariance = ((k - key_mean) * root).to(q.dtype).transpose(-1, -2) @ (v * (root * scale)).to(q.dtype)
    return merge_heads_5d((q @ covariance + value_mean.to(q.dtype)).to(dtype))


# --- analytic gradient: one matmul for each tensor, forward and backward ----------------------------------------------


def _map_features(x: Tensor, num_heads: int, kernel: str, dtype: torch.dtype) -> Tensor:
    """Split heads and apply the feature map: (B, N, heads * d) -> (B, heads, N, d). For ``'identity'`` it is a view."""
    if kernel == 'identity':
        return split_heads(x, num_heads).to(dtype)
    wide = copy_heads(x, num_heads, torch.promote_types(dtype, torch.float32))
    return write_map(kernel, wide, wide).to(dtype)


def _forward(q, k, v, mask, num_heads, scale, kernel):
    """Return the output, and scaled covariance, mean key, mean value and token count for :func:`_backward`."""
    wide, products, dtype = torch.promote_types(accumulation_dtype(q), v.dtype), product_dtype(q, v), v.dtype
    q, k = _map_features(q, num_heads, kernel, products), _map_features(k, num_heads, kernel, products)
    v = split_heads(v, num_heads).to(products)
    count = count_tokens(k, mask)
    key_mean, value_mean = token_mean(k, mask), token_mean(v, mask, zero_padded=True)
    batch, heads, tokens, _ = k.shape

    def covary(images=slice(None), rows=slice(None)) -> Tensor:
        # centred before the product: the difference of two rounded products would lose the digits that rounding left
        centred = subtract(k[images, :, rows], key_mean[images], products)
        return centred.transpose(-1, -2) @ v[images, :, rows]

    parts = list(blocks(k, batch, tokens))
    if len(parts) == 1:
        covariance = covary()
    else:
        covariance = torch.zeros(batch, heads, k.shape[-1], v.shape[-1], dtype=wide, device=q.device)
        for images, rows in parts:
            covariance[images] += covary(images, rows)
    covariance = covariance * (scale / count)
    matrix = covariance.to(products)
    out = q.new_empty(batch, q.shape[2], heads, v.shape[-1], dtype=dtype).transpose(1, 2)
    for images, rows in blocks(out, batch, q.shape[2]):
        torch.add(q[images, :, rows] @ matrix[images], value_mean[images], out=out[images, :, rows])
    return out.transpose(1, 2).flatten(2), (matrix, key_mean, value_mean, count if mask is not None else None)


def _backward(grads, inputs, kept, wanted, num_heads, scale, kernel):
    """Return the gradients of the inputs; for the arguments see :func:`.dispatch.function_of`."""
    (q, k, v, mask), (matrix, key_mean, value_mean, count) = inputs, kept
    products, wide = matrix.dtype, key_mean.dtype
    made = [torch.empty_like(t) for t in (q, k, v)]
    grad_q, grad_k, grad_v = (split_heads(t, num_heads) for t in made)
    q, k = _map_features(q, num_heads, kernel, products), _map_features(k, num_heads, kernel, products)
    v, grad = split_heads(v, num_heads).to(products), split_heads(grads[0], num_heads).to(products)
    count = k.shape[2] if count is None else count
    if not dispatch.on_cpu(grad):  # two matmuls read it
        grad = grad.contiguous()
    each = grad.sum(dim=2, keepdim=True, dtype=wide) / count  # mean(v) is part of every token's output
    inner = ((q.transpose(-1, -2) @ grad) * (scale / count)).to(products)
    inner_t, back = inner.transpose(-1, -2), matrix.transpose(-1, -2)
    # bfloat16 matmuls round, so keys and values are centred before them; in other types, while the result is written
    rounds = products == torch.bfloat16
    if not rounds:
        key_shift, value_shift = value_mean @ inner_t, each - key_mean @ inner
    for images, rows in blocks(grad, len(grad), grad.shape[2]):
        part = (images, slice(None), rows)
        _write(grad_q[part], grad[part] @ back[images], 0, q[part], kernel)
    for images, rows in blocks(k, len(k), k.shape[2]):
        part = (images, slice(None), rows)
        if rounds:
            keys, values = (subtract(x[part], mean[images], products) for x, mean in ((k, key_mean), (v, value_mean)))
            _write(grad_k[part], values @ inner_t[images], 0, k[part], kernel)
            torch.add(keys @ inner[images], each[images], out=grad_v[part])
        else:
            _write(grad_k[part], v[part] @ inner_t[images], key_shift[images], k[part], kernel)
            torch.add(k[part] @ inner[images], value_shift[images], out=grad_v[part])
    if mask is not None:
        for of_keys in (grad_k, grad_v):
            of_keys.mul_(mask[:, None, :, None])
    return *made, None


def _write(place: Tensor, grad: Tensor, shift: Union[Tensor, int], mapped: Tensor, kernel: str) -> None:
    """Write the gradient of the input of the feature map ``kernel`` to ``place``. ``grad - shift`` is the gradient of
    the output ``mapped``."""
    if kernel == 'identity' and isinstance(shift, Tensor):
        torch.sub(grad, shift, out=place)
    elif kernel == 'identity':
        place.copy_(grad)
    else:
        place.copy_(IN_PLACE[kernel][1](mapped, grad.sub_(shift)))


_attention = with_gradient(_equation, _forward, _backward)
