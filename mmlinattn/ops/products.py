# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Matrix products: linear layers, and which library makes them on this CPU.

float32 products are oneDNN's or those of PyTorch's own library (MKL, OpenBLAS). Mostly both are alike, and PyTorch's
own calls cost less; but MKL uses AVX-512 on Intel's cores only, and runs at half of oneDNN's rate where AMD's have it.
So the CPU decides: a measurement would be disturbed by whatever else runs, and results would differ from start to
start. The environment variable ``MMLINATTN_PRODUCTS`` (``auto``, ``torch``, ``onednn``) says otherwise. Results differ
by rounding only: 1e-5 relative to the largest.
"""

import functools
import os
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private
from .tensors import first_order

VARIABLE = 'MMLINATTN_PRODUCTS'
CHOICES = ('auto', 'torch', 'onednn')
_CPU_INFO = Path('/proc/cpuinfo')
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
    """:func:`linear` where it has been found out how it is to run."""
    if route.backend == 'cpu':
        if not route.records:
            return _fused(x, weight, bias, gelu, residual, route)
        large = x.numel() * len(weight) >= _MIN_TRAINED_MACS and not route.autocasts
        if large and x.dtype == torch.float32 and weight.is_contiguous() and dispatch.onednn_takes(x, weight):
            return _finished(_Linear.apply(x, weight, bias), gelu, residual)
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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return private.LINEAR(x, weight, bias, 'none', [], '')

    @first_order
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        by_onednn = prefers_onednn(x, weight)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad, weight.T) if by_onednn else grad @ weight
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            grad_weight = _inner_product(rows, inputs) if by_onednn else rows.T @ inputs
        return grad_x, grad_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` of (M, N) and (M, K). oneDNN copies the first factor, which is to be the narrower one."""
    if a.shape[1] <= b.shape[1]:
        return product(a.T, b.T)
    return product(b.T, a.T).T.contiguous()


def prefers_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether ``product`` is the faster way to multiply these two matrices.

    Raises:
        ValueError: For an unknown value of ``MMLINATTN_PRODUCTS``.
    """
    if a.dtype != torch.float32 or not dispatch.onednn_takes(a, b):
        return False
    choice = os.environ.get(VARIABLE, '') or 'auto'
    if choice not in CHOICES:
        raise ValueError(f'{VARIABLE}={choice!r} has to be one of {CHOICES}')
    return choice == 'onednn' or (choice == 'auto' and _slows_mkl())


@functools.cache
def _slows_mkl() -> bool:
    """Whether PyTorch's library is MKL, and this CPU one of AMD's with AVX-512."""
    try:
        cpu = _CPU_INFO.read_text()
    except OSError:  # not Linux
        return False
    return torch.backends.mkl.is_available() and 'AuthenticAMD' in cpu and 'avx512f' in cpu


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of (..., K) and (N, K) by oneDNN. It copies an ``a`` with gaps; on such a ``b`` it is a
    thousand times slower, so that it is copied here."""
    return private.LINEAR(a, b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous(), None, 'none', [], '')
