# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Callable
from typing import Optional

from torch import Tensor, nn

from .. import forms
from . import reference


def feed_forward(
    x: Tensor, hidden: Callable[[Tensor], Tensor], layer: nn.Module, scale: Optional[Tensor] = None, halo: int = 0
) -> Tensor:
    """``layer(hidden(x)) * scale`` on a map.

    Args:
        x (Tensor): (B, H, W, C), or tokens (B, N, C) where ``halo`` is 0.
        hidden (Callable): From the map to the hidden map, (B, H, W, D).
        layer (nn.Module): The linear layer from D to C' channels, or what takes its place.
        scale (Tensor, optional): (C',), see :func:`~mmlinattn.ops.apply_linear`.
        halo (int): Rows above and below that a row of the hidden map depends on.

    Returns:
        Tensor: (B, H, W, C').
    """
    return forms.pick(reference, x).feed_forward(x, hidden, layer, scale, halo)
