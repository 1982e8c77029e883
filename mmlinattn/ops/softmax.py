# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .products import prefers_onednn, product
from .rotary import rotate_by_head
from .tensors import first_order, gradients_like, merge_heads, split_heads

_MIN_MACS = 2**22  # of a head's logits, for each thread; below, the calls cost more than the products gain
_BLOCK_NUMEL = 2**21  # logits of a block of rows
_MAX_KEYS = 2**13  # beyond, a block of a few hundred rows leaves the cache, and the fused kernel's tiles do not
_SMALLEST_WEIGHT = 1e-15  # in rows; smaller ones are 0, since their products could be denormal numbers


def masked_logit(dtype: torch.dtype) -> float:
    """What is added to hide a key: exp of it is 0 beside any real key. It is finite so that a row of hidden keys alone
    (all padding) stays so."""
    return torch.finfo(dtype).min / 4


def hide(bias: Optional[Tensor], mask: Optional[Tensor], like: Tensor) -> Optional[Tensor]:
    """``bias`` in the type of ``like``, plus what hides the keys that ``mask`` (B, M) leaves out."""
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
        hidden = hidden.masked_fill(~mask, masked_logit(like.dtype))[:, None, None, :]
        return hidden if bias is None else bias.to(like.dtype) + hidden
    return None if bias is None else bias.to(like.dtype)


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

    On CPUs whose products are faster by oneDNN (:mod:`.products`), large maps are computed in blocks of rows.

    O(N M d) operations for each head in O(N + M) memory.

    Source: Vaswani et al. 2017, Eq. 1.

    Args:
        q (Tensor): Queries, (B, N, num_heads * d).
        k (Tensor): Keys, (B, M, num_heads * d).
        v (Tensor): Values, (B, M, E).
        num_heads (int): Heads that the channels are split into.
        rotary (Tensor, optional): (N, d / 2, 2), see :func:`~mmlinattn.ops.rotate`; needs N = M.
        mask (Tensor, optional): (B, M) bool, True for real tokens.
        bias (Tensor, optional): Added to the logits, broadcastable to (B, heads, N, M), with four dimensions.

    Returns:
        Tensor: (B, N, E).
    """
    if rotary is None:
        q, k = split_heads(q, num_heads), split_heads(k, num_heads)
    else:
        q, k = rotate_by_head(q, k, num_heads, rotary)
    v = split_heads(v, num_heads)
    return merge_heads(attend(q, k, v, hide(bias, mask, q)))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """:func:`softmax_attention` of (B, heads, N, d) tensors."""
    if dispatch.is_transformed():  # PyTorch's fused kernels have no forward-mode derivatives
        return equation(q, k, v, bias)
    route = dispatch.route(q, k, v)
    if bias is None and route.backend == 'cpu' and not route.autocasts and _takes_rows(q, k, v):
        return _Rows.apply(q, k, v) if route.records else _rows(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def equation(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    """:func:`attend` with its map of all pairs, which can be differentiated as often and in any way."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v


# --- in blocks of rows, by oneDNN's products --------------------------------------------------------------------------


def _takes_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    macs = q[0, 0].numel() * k.shape[2] if len(q) else 0
    large = macs >= torch.get_num_threads() * _MIN_MACS and k.shape[2] <= _MAX_KEYS
    return large and v.dtype == q.dtype and prefers_onednn(q, k)


def _heads(*tensors: Tensor) -> Iterator[list[Tensor]]:
    for batch in range(tensors[0].shape[0]):
        for head in range(tensors[0].shape[1]):
            yield [tensor[batch, head] for tensor in tensors]


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    rows = max(_BLOCK_NUMEL // k.shape[0], 1)
    for start in range(0, q.shape[0], rows):
        yield slice(start, start + rows)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    logits = product(q * q.shape[-1] ** -0.5, k)
    return torch.threshold_(torch.softmax(logits, dim=-1, out=logits), _SMALLEST_WEIGHT, 0.0)


def _rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, heads, N, E), in memory where the heads of a token lie side by side."""
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    for query, key, value, result in _heads(q, k, v, out):
        key, value = key.contiguous(), value.contiguous()
        for rows in _blocks(query, key):
            result[rows] = product(_weights(query[rows], key), value.T)
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v):
        ctx.save_for_backward(q, k, v)
        return _rows(q, k, v)

    @first_order
    def backward(ctx: Any, grad):
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grads = gradients_like(q, k, v)
        for query, key, value, d_out, d_q, d_k, d_v in _heads(q, k, v, grad, *grads):
            key, value, d_out = key.contiguous(), value.contiguous(), d_out.contiguous()
            scaled_key = (key * scale).T
            sum_k: Any = 0
            sum_v: Any = 0
            for rows in _blocks(query, key):
                weights, d_weights = _weights(query[rows], key), product(d_out[rows], value)
                sum_v = sum_v + product(d_out[rows].T, weights.T)
                d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, q.dtype)
                d_q[rows] = product(d_logits, scaled_key)
                sum_k = sum_k + product(query[rows].T * scale, d_logits.T)
            d_k.copy_(sum_k.T)
            d_v.copy_(sum_v.T)
        return tuple(grads)
