# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Arithmetic of sizes that holds in graphs that also run at other sizes than the traced one.

Height and width of a map are ints in eager mode, symbols in ``torch.compile`` and ``torch.export``, and tensors without
dimensions in ``torch.jit.trace``. Comparing symbols or tensors in Python writes the answer for one size into the graph.
Negative numbers are divided in another way by graphs than by Python, so nothing here divides one.
"""

import torch
from torch import Tensor

from . import private


def is_known(*sizes) -> bool:
    """Whether all sizes are numbers now, rather than something that a graph leaves open."""
    if any(isinstance(size, Tensor) for size in sizes):
        return False
    return all(private.has_static_value(size) for size in sizes)


def round_up(size, step: int):
    """The smallest multiple of ``step`` that is not below ``size``, positive."""
    return (size + step - 1) // step * step


def as_tensor(size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A size, known or not, as a tensor without dimensions on the device of ``like``."""
    if isinstance(size, Tensor):
        return size.to(device=like.device, dtype=dtype)
    return torch.scalar_tensor(size, dtype=dtype, device=like.device)
