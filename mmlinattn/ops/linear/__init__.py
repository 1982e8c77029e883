# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from .. import forms
from ..memory import call, is_plain_linear
from . import reference


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """``x @ weight.T + bias``, or its GELU, by the fastest product there is.

    Args:
        x (Tensor): (..., C).
        weight (Tensor): (C', C).
        bias (Tensor, optional): (C',).
        gelu (bool): Apply GELU.

    Returns:
        Tensor: (..., C').
    """
    return forms.pick(reference, x, weight, bias).linear(x, weight, bias, gelu)


def takes_scale(x: Tensor) -> bool:
    """Whether :func:`apply_linear` of ``x`` may scale its matrix: not where products are made in half precision, in
    which small scales underflow."""
    return x.dtype == forms.accumulation_dtype(x) and not forms.autocasts(x)


def apply_linear(layer: nn.Module, x: Tensor, scale: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """``layer(x) * scale``, or ``gelu(layer(x))``.

    The scale goes into the matrix: no pass over the map, and no map kept for its gradient (for :func:`takes_scale`
    only). A layer that is no plain linear one (an adapter in its place, one with hooks)
    is called as it is.

    Args:
        layer (nn.Module): ``nn.Linear`` with C inputs and C' outputs, or what takes its place.
        x (Tensor): (..., C).
        scale (Tensor, optional): (C',).
        gelu (bool): Apply GELU; not together with ``scale``.

    Returns:
        Tensor: (..., C').
    """
    if not is_plain_linear(layer):
        out = call(layer, x)
        out = out if scale is None else out * scale
        return F.gelu(out) if gelu else out
    weight, bias = layer.weight, layer.bias
    if scale is not None:
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    return linear(x, weight, bias, gelu)
