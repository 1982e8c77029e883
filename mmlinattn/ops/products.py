# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear layers of :mod:`mmlinattn.inference`, with what follows them in the pass that writes the product."""

from typing import Optional

import torch.nn.functional as F
from torch import Tensor

from . import dispatch, private


def linear_by(
    route: dispatch.Route,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    gelu: bool = False,
    residual: Optional[Tensor] = None,
) -> Tensor:
    """``x @ weight.T + bias``, its GELU, or its sum with a residual, on a CPU without gradients.

    Args:
        route (Route): The type of the product, and whether oneDNN makes it.
        x (Tensor): (..., C).
        weight (Tensor): (C', C).
        bias (Tensor, optional): (C',).
        gelu (bool): Apply GELU.
        residual (Tensor, optional): (..., C'), added; not together with ``gelu``.

    Returns:
        Tensor: (..., C').
    """
    dtype = route.dtype
    x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not (route.onednn and weight.is_contiguous()):
        out = F.linear(x, weight, bias)
        out = F.gelu(out) if gelu else out
    elif residual is not None and residual.dtype == dtype:
        return private.LINEAR.binary(x, residual, weight, bias, 'add')
    else:
        out = private.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
    return out if residual is None else residual + out
