# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Arithmetic of sizes and views of tensors, right in graphs of dynamic sizes.

Height and width of a map are ints in eager mode, symbols in ``torch.compile`` and ``torch.export``, and tensors without
dimensions in ``torch.jit.trace``. Comparing symbols or tensors in Python writes the answer for one size into the graph.
Graphs and Python divide negative numbers differently, so no function divides one.
"""

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch


def is_known(*sizes) -> bool:
    """Return True if all sizes are numbers, not symbols or tensors of a graph."""
    if dispatch.state.settled:
        return True
    if any(isinstance(size, Tensor) for size in sizes):
        return False
    return all(private_apis.has_static_value(size) for size in sizes)


def round_up(size, step: int):
    """The smallest multiple of ``step`` that is not below ``size``, positive."""
    return (size + step - 1) // step * step


def as_tensor(size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A size, known or not, as a tensor without dimensions on the device of ``like``."""
    if isinstance(size, Tensor):
        return size.to(device=like.device, dtype=dtype)
    return torch.scalar_tensor(size, dtype=dtype, device=like.device)


def unflatten(x: Tensor, dim: int, sizes) -> Tensor:
    """``x.unflatten(dim, sizes)``; ``torch.onnx.export(..., dynamo=False)`` would make the sizes constants. One may be
    -1."""
    if dispatch.state.settled:
        return torch.unflatten(x, dim, sizes)
    dim, known, open_at = dim % x.dim(), 1, None
    sizes = list(sizes)
    for i, size in enumerate(sizes):
        if type(size) is int and size == -1:
            open_at = i
        else:
            known = known * size
    if open_at is not None:  # of no elements, a reshape could not tell
        sizes[open_at] = x.shape[dim] // known
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def clone_if_open(x: Tensor) -> Tensor:
    """Return ``x``, or in a graph with a dynamic size that may be 1, a contiguous clone.

    For another layout PyTorch compares the size with 1, and export would add that as a guard.
    """
    if dispatch.state.settled:
        return x
    if any(isinstance(size, torch.SymInt) and not private_apis.is_surely_above_one(size) for size in x.shape):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def to_image(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view in channels-last memory unless :func:`clone_if_open` copies it."""
    x = x.permute(0, 3, 1, 2)
    return x if dispatch.state.settled else clone_if_open(x)
