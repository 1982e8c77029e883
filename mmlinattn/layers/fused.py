# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autocast import autocasts
from .tracing import is_traced

# oneDNN's kernels, with bias and GELU in the same pass, which torch.compile uses on CPUs. PyTorch's own product writes
# the bias to the result first, and takes up to a quarter longer. Not every build has them.
_LINEAR = getattr(torch.ops.mkldnn, '_linear_pointwise', None)
_CONV = getattr(torch.ops.mkldnn, '_convolution_pointwise', None)
_MIN_TRAINED_MACS = 2**23  # below, calling Python in the backward pass costs what the product saves


def _fuses(x: Tensor, weight: Tensor) -> bool:
    if is_traced() or _LINEAR is None or _CONV is None:
        return False
    # not for tensors that only stand for others (fake, traced, counted)
    if type(x) is not Tensor or x.device.type != 'cpu' or autocasts(x):
        return False
    return x.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.enabled


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], gelu: bool = False) -> Tensor:
    """``x @ weight.T + bias``, or its GELU, by the fastest product there is.

    Args:
        x (Tensor): (..., C).
        weight (Tensor): (C', C).
        bias (Tensor, optional): (C',).
        gelu (bool): Apply GELU.

    Returns:
        Tensor: (..., C').
    """
    if _fuses(x, weight):
        if not torch.is_grad_enabled():
            return _LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
        if not gelu and x.numel() * len(weight) >= _MIN_TRAINED_MACS:
            return _Linear.apply(x, weight, bias)
    out = F.linear(x, weight, bias)
    return F.gelu(out) if gelu else out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _LINEAR(x, weight, bias, 'none', [], '')

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = _LINEAR(grad, weight.T, None, 'none', [], '') if ctx.needs_input_grad[0] else None
        grad_weight = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None


def conv_gelu(x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int) -> Tensor:
    """GELU of a convolution, (B, C, H, W) -> (B, C', ceil(H / stride), ceil(W / stride)), for inference.

    Args:
        x (Tensor): (B, C, H, W).
        weight (Tensor): (C', C, k, k), k odd; the padding is ``k // 2``.
        bias (Tensor, optional): (C',).
        stride (int): Of the convolution.
    """
    padding = [weight.shape[-1] // 2] * 2
    if _fuses(x, weight):
        return _CONV(x, weight, bias, padding, [stride] * 2, [1, 1], 1, 'gelu', [], 'none')
    return F.gelu(F.conv2d(x, weight, bias, stride, padding))


def apply_linear(layer: nn.Module, x: Tensor, scale: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """``layer(x) * scale``, or ``gelu(layer(x))``.

    The scale (C',) goes into the matrix: no pass over the map, and no map kept for its gradient. Not for half
    precision: there, small scales would underflow. Layers other than ``nn.Linear`` (adapters in its place) and those
    with hooks are called.
    """
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        out = layer(x)
        out = out if scale is None else out * scale
        return F.gelu(out) if gelu else out
    weight, bias = layer.weight, layer.bias
    if scale is not None:
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    return linear(x, weight, bias, gelu)
