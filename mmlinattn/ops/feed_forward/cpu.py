# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In inference, large maps pass through in strips of rows: the hidden map, several times as wide as its input, then
stays in the cache and is never allocated whole."""

from collections.abc import Callable
from typing import Optional

from torch import Tensor, nn

from ..forms import records
from ..linear import apply_linear
from ..memory import is_plain_linear
from . import reference

STRIP_NUMEL = 2**19  # of the hidden map: 2 MiB in float32


def feed_forward(
    x: Tensor, hidden: Callable[[Tensor], Tensor], layer: nn.Module, scale: Optional[Tensor] = None, halo: int = 0
) -> Tensor:
    if records() or x.numel() == 0 or not is_plain_linear(layer):  # whoever watches the layer sees whole maps
        return reference.feed_forward(x, hidden, layer, scale, halo)
    height, row_numel = x.shape[1], x[0, 0].numel() // x.shape[-1] * layer.in_features
    if x.shape[0] * height * row_numel <= 2 * STRIP_NUMEL:
        return reference.feed_forward(x, hidden, layer, scale, halo)
    rows = max(STRIP_NUMEL // row_numel, 8 * halo, 1)
    out = None
    for i, image in enumerate(x.split(1)):
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            first, last = max(top - halo, 0), min(bottom + halo, height)
            part = hidden(image[:, first:last])[:, top - first : bottom - first]
            strip = apply_linear(layer, part, scale)
            if out is None:
                out = strip.new_empty(*x.shape[:-1], strip.shape[-1])
            out[i, top:bottom] = strip[0]
    return out
