# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Callable
from typing import Optional

from torch import Tensor, nn

from ..linear import apply_linear


def feed_forward(
    x: Tensor, hidden: Callable[[Tensor], Tensor], layer: nn.Module, scale: Optional[Tensor] = None, halo: int = 0
) -> Tensor:
    return apply_linear(layer, hidden(x), scale)
