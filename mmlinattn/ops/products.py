# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Matrix products: linear layers, with what follows them in the pass that writes the product."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .gradients import Rule, by_hand

_MIN_TRAINED_MACS = 2**23  # below, calling Python in the backward pass costs what the product saves


def linear(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False, residual: Optional[Tensor] = None
) -> Tensor:
    """``x @ weight.T + bias``, its GELU, or its sum with a residual.

    In inference on CPUs, bias, GELU and residual are added in the pass that writes the product, in training the bias,
    which PyTorch would write to memory first.

    Args:
        x (Tensor): (..., C).
        weight (Tensor): (C', C).
        bias (Tensor, optional): (C',).
        gelu (bool): Apply GELU.
        residual (Tensor, optional): (..., C'), added; not together with ``gelu``.

    Returns:
        Tensor: (..., C').
    """
    return linear_by(dispatch.route(x, weight, bias, residual), x, weight, bias, gelu, residual)


def linear_by(
    route: dispatch.Route,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    gelu: bool = False,
    residual: Optional[Tensor] = None,
) -> Tensor:
    """:func:`linear` by a route that is known already."""
    if route.backend == 'cpu':
        if not route.records:
            return _fused(x, weight, bias, gelu, residual, route)
        large = x.numel() * len(weight) >= _MIN_TRAINED_MACS and not route.autocasts
        if large and x.dtype == torch.float32 and weight.is_contiguous() and dispatch.onednn_takes(x, weight):
            return _finished(by_hand(_LINEAR, x, weight, bias), gelu, residual)
    return _finished(F.linear(x, weight, bias), gelu, residual)


def _finished(out: Tensor, gelu: bool, residual: Optional[Tensor]) -> Tensor:
    out = F.gelu(out) if gelu else out
    return out if residual is None else residual + out


def _fused(x: Tensor, weight: Tensor, bias: Optional[Tensor], gelu: bool, residual: Optional[Tensor], route) -> Tensor:
    dtype = route.dtype
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not (route.onednn and weight.is_contiguous()):
        return _finished(F.linear(x, weight, bias), gelu, residual)
    if residual is not None and residual.dtype == dtype:
        return private.LINEAR.binary(x, residual, weight, bias, 'add')
    out = private.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
    return out if residual is None else residual + out


def _forward(x, weight, bias):
    return private.LINEAR(x, weight, bias, 'none', [], ''), ()


def _backward(grads, inputs, kept, wanted):
    (grad,), (x, weight, _) = grads, inputs
    grad_x = grad @ weight if wanted[0] else None
    rows = grad.flatten(0, -2)
    grad_weight = rows.T @ x.flatten(0, -2) if wanted[1] else None
    return grad_x, grad_weight, rows.sum(dim=0) if wanted[2] else None


_LINEAR = Rule(F.linear, _forward, _backward)
