# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import call, is_plain_linear


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor], convolves: bool
) -> tuple[Tensor, ...]:
    if kv is not None and is_plain_linear(layer):
        rows = [widths[0], widths[1] + widths[2], sum(widths[3:])]  # only what is needed of either
        weights = layer.weight.split(rows)
        biases = [None] * 3 if layer.bias is None else layer.bias.split(rows)
        k, v = F.linear(kv, weights[1], biases[1]).split(list(widths[1:3]), dim=-1)
        gate = [F.linear(x, weights[2], biases[2])] if widths[3:] else []
        return F.linear(x, weights[0], biases[0]), k, v, *gate
    q, k, v, *gate = call(layer, x).split(list(widths), dim=-1)
    if kv is not None:
        # the layer is called as a whole, so that whatever takes its place may be anything
        _, k, v, *_ = call(layer, kv).split(list(widths), dim=-1)
    return q, k, v, *gate
