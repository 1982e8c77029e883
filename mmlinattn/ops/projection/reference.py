# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from ..memory import call


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor] = None, convolves: bool = False
) -> tuple[Tensor, ...]:
    q, k, v, *gate = call(layer, x).split(list(widths), dim=-1)
    if kv is not None:
        # the layer is called as a whole, so that whatever takes its place may be anything
        _, k, v, *_ = call(layer, kv).split(list(widths), dim=-1)
    return q, k, v, *gate
