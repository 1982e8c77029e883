# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor, nn

from .. import forms
from . import reference


def gelu_of_conv(x: Tensor, conv: nn.Module) -> Tensor:
    """``gelu(conv(x))``, in one pass over the map in inference on CPUs.

    Args:
        x (Tensor): (B, C, H, W), best in channels-last memory.
        conv (nn.Module): A convolution from C to C' channels, or what takes its place.

    Returns:
        Tensor: (B, C', H', W').
    """
    return forms.pick(reference, x).gelu_of_conv(x, conv)
