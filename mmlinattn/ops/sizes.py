# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Arithmetic of sizes that holds in graphs which serve other sizes than the one they were recorded at.

Height and width of a map are ints in eager mode, symbols in ``torch.compile`` and ``torch.export``, and tensors without
dimensions in ``torch.jit.trace``. Comparing symbols or tensors in Python writes the answer for one size into the graph.
Negative numbers are divided in another way by graphs than by Python, so nothing here divides one.
"""

import functools

import torch
from torch import Tensor

from . import dispatch, private


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


def serves_ones(forward):
    """Decorates the ``forward`` of a model, so that ``torch.export`` records what holds for sizes of 1 as for others.

    Export asks of every size that is left open whether it is 1, and writes the answer into the graph: the number of
    windows of a small map, or of its rows, would have to stay above 1 (or be 1) for ever. ``torch.onnx.export``
    switches that off by itself. ``torch.compile`` makes one more graph for such a size instead.
    """

    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        if private.CAN_SERVE_ONES and dispatch.is_exported():
            with private.serving_ones():
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    return wrapped


def settled(x: Tensor) -> Tensor:
    """``x`` itself; in a graph where one of its open sizes may be 1, a copy in plain memory.

    How the memory of a tensor with such a size is to be described, PyTorch decides by asking whether it is 1. Of plain
    memory it does not ask.
    """
    if any(isinstance(size, torch.SymInt) and not private.is_surely_above_one(size) for size in x.shape):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def to_image(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view in channels-last memory where :func:`settled` leaves it one."""
    return settled(x.permute(0, 3, 1, 2))
