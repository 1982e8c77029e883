# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Large maps in blocks of rows whose products are oneDNN's; else PyTorch's fused kernel for CPUs, with gradients that
can be differentiated again.

The fused kernel multiplies by MKL, on AMD cores at half the rate, and in many more and smaller products.
"""

from collections.abc import Iterator
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import onednn
from ..forms import records
from ..kernels import LOWEST_EXPONENT
from ..memory import differentiable, gradients_like, token_blocks
from .reference import equation

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_MIN_MACS = 2**22  # of a head's logits, for each thread; below, the calls cost more than the products gain
_ROWS = 128  # of a block, for each thread, at least: each block reads all keys
_MAX_KEYS = 2**13  # beyond, such a block leaves the cache, and the fused kernel's tiles do not


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    learns = records() and any(t.requires_grad for t in (q, k, v)) and not (bias is not None and bias.requires_grad)
    if bias is None and _in_rows(q, k, v):
        return _Rows.apply(q, k, v) if learns else _rows(q, k, v)
    if learns and torch._fused_sdp_choice(q, k, v, bias) == SDPBackend.FLASH_ATTENTION.value:
        return _Fused.apply(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias):
        out, log_sum = _FORWARD(q, k, v, attn_mask=bias)
        ctx.save_for_backward(q, k, v, bias, out, log_sum)
        ctx.plain = 3, lambda q, k, v: equation(q, k, v, bias)
        return out

    @differentiable
    def backward(ctx, grad):
        q, k, v, bias, out, log_sum = ctx.saved_tensors
        return *_BACKWARD(grad, q, k, v, out, log_sum, 0.0, False, attn_mask=bias), None


# --- in rows ----------------------------------------------------------------------------------------------------------


def _in_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    macs = q[0, 0].numel() * k.shape[2] if len(q) else 0
    large = macs >= torch.get_num_threads() * _MIN_MACS and k.shape[2] <= _MAX_KEYS
    return large and onednn.takes(q, k) and v.dtype == q.dtype


def _heads(*tensors: Tensor) -> Iterator[list[Tensor]]:
    for batch in range(tensors[0].shape[0]):
        for head in range(tensors[0].shape[1]):
            yield [tensor[batch, head] for tensor in tensors]


def _weights(q: Tensor, k: Tensor) -> Tensor:
    logits = onednn.product(q * q.shape[-1] ** -0.5, k)
    torch.maximum(logits, logits.amax(dim=-1, keepdim=True).add_(LOWEST_EXPONENT), out=logits)  # no denormal numbers
    return torch.softmax(logits, dim=-1, out=logits)


def _rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, heads, N, E), in memory where the heads of a token lie side by side."""
    batch, heads, tokens, _ = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
    for query, key, value, result in _heads(q, k, v, out):
        key, value = key.contiguous(), value.contiguous()
        for rows in token_blocks(len(key), tokens, q.device, _ROWS):
            result[rows] = onednn.product(_weights(query[rows], key), value.T)
    return out


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        ctx.plain = 3, lambda q, k, v: equation(q, k, v, None)
        return _rows(q, k, v)

    @differentiable
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        tokens, scale = q.shape[2], q.shape[-1] ** -0.5
        grads = gradients_like(q, k, v)
        for query, key, value, d_out, d_q, d_k, d_v in _heads(q, k, v, grad, *grads):
            key, value, d_out = key.contiguous(), value.contiguous(), d_out.contiguous()
            scaled_key, sum_k, sum_v = (key * scale).T, 0, 0
            for rows in token_blocks(len(key), tokens, q.device, _ROWS):
                weights, d_weights = _weights(query[rows], key), onednn.product(d_out[rows], value)
                sum_v = sum_v + onednn.product(d_out[rows].T, weights.T)
                d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, q.dtype)
                d_q[rows] = onednn.product(d_logits, scaled_key)
                sum_k = sum_k + onednn.product(query[rows].T * scale, d_logits.T)
            d_k.copy_(sum_k.T)
            d_v.copy_(sum_v.T)
        return tuple(grads)
