# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autocast import autocasts

# oneDNN's product, which torch.compile uses on CPUs: with bias and GELU in the same pass, where PyTorch's own writes
# the bias to the result first, and up to a fifth faster. Not every build has it.
_FUSED = getattr(torch.ops.mkldnn, '_linear_pointwise', None)


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
    plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing() or _FUSED is None
    # not for tensors that only stand for others (fake, traced, counted)
    if plain or type(x) is not Tensor or x.device.type != 'cpu' or autocasts(x):
        fused = False
    else:
        fused = x.dtype == weight.dtype == torch.float32 and torch.backends.mkldnn.enabled
    if fused:
        return _FUSED(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
    out = F.linear(x, weight, bias)
    return F.gelu(out) if gelu else out


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
