# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor

from .. import forms
from . import reference


def predicted_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    """Depth-wise convolution of stride 1 with kernels of its own for each image (InLine Eq. 6).

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        kernels (Tensor): (B, C, k, k), k odd.

    Returns:
        Tensor: (B, C, h, w).
    """
    return forms.pick(reference, x, kernels).predicted_conv2d(x, kernels)
