# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Only what is needed of each kind of token, in as many tensors as the memory of the steps that follow wants."""

from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from ..forms import records
from ..linear import apply_linear, linear
from ..memory import is_plain_linear, split
from . import reference


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor], convolves: bool
) -> tuple[Tensor, ...]:
    if not is_plain_linear(layer):
        return reference.project(layer, x, widths, kv, convolves)
    if kv is None and not records() and not convolves:
        return apply_linear(layer, x).split(list(widths), dim=-1)
    return in_parts(layer, x, widths, kv, gate_with_values=kv is None)


def in_parts(layer: nn.Linear, x: Tensor, widths, kv: Optional[Tensor], gate_with_values: bool) -> tuple[Tensor, ...]:
    """Several results: autograd keeps all of one tensor or nothing, and attentions that map or rotate queries and keys
    do not need them afterwards; convolutions on CPUs would copy values that lie among other things."""
    q, k, v, *gate = widths
    if kv is not None:
        parts = [(x, [q]), (kv, [k, v])]
    else:
        parts = [(x, [q, k]), (x, [v])]
    if gate and gate_with_values:
        parts[-1][1].extend(gate)
    elif gate:
        parts.append((x, gate))
    rows = [sum(part) for _, part in parts]
    weights = layer.weight.split(rows)
    biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
    projected = []
    for (tokens, part), weight, bias in zip(parts, weights, biases):
        projected += split(linear(tokens, weight, bias), part)
    return tuple(projected)
