# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import forms
from . import reference


def conv_of_gelu(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int = 1, groups: int = 1, residual: bool = False
) -> Tensor:
    """Convolution of ``gelu(x)``, plus ``gelu(x)`` itself where ``residual``, that keeps only ``x`` for the backward
    pass.

    GELU is cheap to compute a second time, and its results on stems and hidden layers are among the largest tensors
    that autograd would keep.

    Args:
        x (Tensor): (B, C, H, W), in any memory format.
        weight (Tensor): (C', C / groups, k, k), k odd; the padding is ``k // 2``.
        bias (Tensor, optional): (C',).
        stride, groups (int): Of the convolution.
        residual (bool): Add ``gelu(x)``; needs C' = C and stride 1.

    Returns:
        Tensor: (B, C', ceil(H / stride), ceil(W / stride)).
    """
    return forms.pick(reference, x, weight, bias).conv_of_gelu(x, weight, bias, stride, groups, residual)
