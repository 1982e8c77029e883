# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor, nn

from ..linear import apply_linear


def hidden_conv(x: Tensor, layer: nn.Module, conv: nn.Module) -> Tensor:
    return conv(apply_linear(layer, x, gelu=True))
