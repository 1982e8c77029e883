# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Depth-wise convolution of stride 1 that keeps the size of the map.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor, optional): (C,).

    Returns:
        Tensor: (B, C, h, w).
    """
    return forms.pick(reference, x, weight, bias).depthwise_conv2d(x, weight, bias)


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, of_gelu: bool = False) -> Tensor:
    """``y + DWConv(y)`` of ``y = x``, or of ``y = gelu(x)``.

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), k odd.
        bias (Tensor): (C,).
        of_gelu (bool): Apply GELU first; it is computed again in the backward pass, which then needs ``x`` only.

    Returns:
        Tensor: (B, C, h, w).
    """
    return forms.pick(reference, x, weight, bias).residual_depthwise_conv2d(x, weight, bias, of_gelu)
