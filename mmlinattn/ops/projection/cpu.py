# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from ..forms import records
from ..linear import apply_linear
from ..memory import is_plain_linear
from . import reference
from .eager import in_parts


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor], convolves: bool
) -> tuple[Tensor, ...]:
    if not is_plain_linear(layer):
        return reference.project(layer, x, widths, kv, convolves)
    if kv is None and not records() and not convolves:
        return apply_linear(layer, x).split(list(widths), dim=-1)
    return in_parts(layer, x, widths, kv, gate_with_values=False)
