# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from .. import forms
from . import reference


def project(
    layer: nn.Module, x: Tensor, widths: Sequence[int], kv: Optional[Tensor] = None, convolves: bool = False
) -> tuple[Tensor, ...]:
    """Queries, keys, values and, where there is one, the gate: one linear layer, whose outputs are split.

    Args:
        layer (nn.Module): ``nn.Linear`` with C inputs and ``sum(widths)`` outputs, or what takes its place.
        x (Tensor): Tokens of the queries (and the gate), (..., N, C).
        widths (Sequence[int]): Widths of queries, keys, values and, if it has a fourth entry, the gate.
        kv (Tensor, optional): Tokens of keys and values, (..., M, C); None for ``x``.
        convolves (bool): Whether the values will be convolved, which asks for memory of their own on CPUs.

    Returns:
        tuple[Tensor]: (..., N or M, width) each, slices of as many tensors as the form sees fit.
    """
    return forms.pick(reference, x, kv).project(layer, x, widths, kv, convolves)
