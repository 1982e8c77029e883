# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .products import prefers_onednn, product
from .tensors import first_order

_MIN_TRAINED_MACS = 2**23  # below, calling Python in the backward pass costs what the product saves


def linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False, residual: Optional[Tensor] = None
) -> Tensor:
    """``x @ weight.T + bias``, its GELU, or its sum with a residual.

    In inference on CPUs, bias, GELU and residual are added in the pass that writes the product. In training there,
    float32 products are oneDNN's where :mod:`.products` finds that faster.

    Args:
        x (Tensor): (..., C).
        weight (Tensor): (C', C).
        bias (Tensor, optional): (C',).
        gelu (bool): Apply GELU.
        residual (Tensor, optional): (..., C'), added; not together with ``gelu``.

    Returns:
        Tensor: (..., C').
    """
    if dispatch.backend(x, weight, bias, residual) == 'cpu':
        if not dispatch.records():
            return _fused(x, weight, bias, gelu, residual)
        large = x.numel() * len(weight) >= _MIN_TRAINED_MACS
        if large and weight.is_contiguous() and not dispatch.autocasts(x) and prefers_onednn(x, weight):
            out = _Linear.apply(x, weight, bias)
            return _finished(out, gelu, residual)
    return _finished(F.linear(x, weight, bias), gelu, residual)


def _finished(out: Tensor, gelu: bool, residual: Optional[Tensor]) -> Tensor:
    out = F.gelu(out) if gelu else out
    return out if residual is None else residual + out


def _fused(x: Tensor, weight: Tensor, bias: Optional[Tensor], gelu: bool, residual: Optional[Tensor]) -> Tensor:
    dtype = dispatch.compute_dtype(x)
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with dispatch.without_autocast(x):
        if not (private.onednn_takes(x, weight) and weight.is_contiguous()):
            return _finished(F.linear(x, weight, bias), gelu, residual)
        if residual is not None and residual.dtype == dtype:
            return private.LINEAR.binary(x, residual, weight, bias, 'add')
        out = private.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
        return out if residual is None else residual + out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return private.LINEAR(x, weight, bias, 'none', [], '')

    @first_order
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.T) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        grad_weight = _inner_product(rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` of (M, N) and (M, K). oneDNN copies the first factor, which is to be the narrower one."""
    if a.shape[1] <= b.shape[1]:
        return product(a.T, b.T)
    return product(b.T, a.T).T.contiguous()
