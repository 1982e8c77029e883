# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In training, GELU is computed again in the backward pass, with the convolution's; in inference it is part of the
linear layer."""

from torch import Tensor, nn

from ..forms import records
from ..linear import apply_linear
from . import reference


def hidden_conv(x: Tensor, layer: nn.Module, conv: nn.Module) -> Tensor:
    return conv(apply_linear(layer, x), of_gelu=True) if records() else reference.hidden_conv(x, layer, conv)
