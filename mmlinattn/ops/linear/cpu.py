# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""oneDNN's products, with bias and GELU in the same pass, as torch.compile uses them on CPUs.

PyTorch's own product writes the bias to the result first, and takes up to a quarter longer; where MKL makes it, on an
AMD core, twice as long, in the forward pass and for both gradients.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import onednn
from ..forms import records
from ..memory import differentiable
from . import reference

_MIN_TRAINED_MACS = 2**23  # below, calling Python in the backward pass costs what the product saves


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    if onednn.takes(x, weight) and weight.is_contiguous():
        if not records():
            return onednn.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
        if x.numel() * len(weight) >= _MIN_TRAINED_MACS:
            out = _Linear.apply(x, weight, bias)
            return F.gelu(out) if gelu else out
    return reference.linear(x, weight, bias, gelu)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        ctx.plain = 3, reference.linear
        return onednn.LINEAR(x, weight, bias, 'none', [], '')

    @differentiable
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        grad_x = onednn.product(grad, weight.T) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        grad_weight = _inner_product(rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` of (M, N) and (M, K). oneDNN copies the first factor, which is to be the narrower one."""
    if a.shape[1] <= b.shape[1]:
        return onednn.product(a.T, b.T)
    return onednn.product(b.T, a.T).T.contiguous()
