# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor, nn

from .. import forms
from . import reference


def hidden_conv(x: Tensor, layer: nn.Module, conv: nn.Module) -> Tensor:
    """``y + DWConv(y)`` of ``y = gelu(layer(x))``: the hidden map of RAVLT's feed-forward network.

    Args:
        x (Tensor): (B, H, W, C).
        layer (nn.Module): The linear layer from C to D channels, or what takes its place.
        conv (nn.Module): :class:`~mmlinattn.layers.ResidualDWConv` of D channels.

    Returns:
        Tensor: (B, H, W, D).
    """
    return forms.pick(reference, x).hidden_conv(x, layer, conv)
