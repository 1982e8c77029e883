# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""PyTorch's fused kernel for CPUs, whose gradients can be differentiated again."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..forms import records
from ..memory import differentiable
from .reference import equation

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor]) -> Tensor:
    learns = records() and any(t.requires_grad for t in (q, k, v)) and not (bias is not None and bias.requires_grad)
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
