# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Grids of tokens, arithmetic of sizes, and views of tensors that stay right in graphs of dynamic sizes.

Height and width of a map are ints in eager mode, symbols in ``torch.compile`` and ``torch.export``, and 0-d tensors in
``torch.jit.trace``. A comparison of symbols or tensors in Python fixes its result for the traced size in the graph.
Graphs and Python round quotients of negative numbers differently, so no function here divides one.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils import private_apis
from . import dispatch


def is_known(*sizes) -> bool:
    """Return True if all sizes are Python numbers rather than symbols or tensors of a graph."""
    may_be_symbol = private_apis.compiler.is_dynamo_compiling()  # there the type of a symbol is int
    for size in sizes:
        if type(size) is int and not may_be_symbol:
            continue
        if isinstance(size, Tensor) or not private_apis.has_static_value(size):
            return False
    return True


def round_up(size, step: int):
    """Return the smallest multiple of ``step`` >= ``size``, for positive sizes."""
    return (size + step - 1) // step * step


def as_tensor(size, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a size to a 0-d tensor on the device of ``like``. A size of a trace, already a tensor, stays on the CPU,
    which operators on every device accept."""
    if isinstance(size, Tensor):
        return size.to(dtype)
    return torch.scalar_tensor(size, dtype=dtype, device=like.device)


def arange(count, like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Return 0, 1, ..., ``count - 1`` on the device of ``like``. Traces name no device, so they run on any."""
    if torch.jit.is_tracing() and not torch.onnx.is_in_onnx_export():
        return (like.new_ones(count, dtype=torch.long).cumsum(0) - 1).to(dtype)
    return torch.arange(count, dtype=dtype, device=like.device)


def unflatten(x: Tensor, dim: int, sizes) -> Tensor:
    """Compute ``x.unflatten(dim, sizes)``; one of ``sizes`` may be -1.

    ``torch.onnx.export(..., dynamo=False)`` would write the sizes of PyTorch's own method into the graph as constants.
    """
    if not dispatch.is_traced():
        return torch.unflatten(x, dim, sizes)
    dim, known, open_at = dim % x.dim(), 1, None
    sizes = list(sizes)
    for i, size in enumerate(sizes):
        if type(size) is int and size == -1:
            open_at = i
        else:
            known = known * size
    if open_at is not None:  # reshape cannot infer a size of a tensor without elements
        sizes[open_at] = x.shape[dim] // known
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def clone_if_dynamic(x: Tensor) -> Tensor:
    """Return a contiguous clone of ``x`` in a graph with a dynamic size that may be 1, otherwise ``x`` itself.

    For a non-contiguous tensor PyTorch compares the size with 1, and export would add this comparison as a guard.
    """
    for size in x.shape:
        if type(size) is not int and isinstance(size, torch.SymInt) and not private_apis.is_surely_above_one(size):
            return x.clone(memory_format=torch.contiguous_format)
    return x


def to_image(x: Tensor) -> Tensor:
    """Move channels first: (B, H, W, C) -> (B, C, H, W), a view unless :func:`clone_if_dynamic` copies it."""
    return clone_if_dynamic(x.permute(0, 3, 1, 2))


def from_image(x: Tensor) -> Tensor:
    """Move channels last: (B, C, H, W) -> (B, H, W, C), a view."""
    return x.permute(0, 2, 3, 1)


class Grid(NamedTuple):
    """Layout of a token sequence: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width to which position tables are resized, if they differ from ``height`` and ``width``. A
    window that is cropped at the right or lower border uses the table of the whole window, from its top left. In graphs
    of dynamic sizes the grid of a window includes padding, and ``within`` is the window cropped to the feature map.
    ``regions``: (windows, N), 0 to 3, for cyclically shifted windows; tokens of different regions are no neighbours.
    """

    height: int
    width: int
    prefix: int = 0
    within: Optional[tuple[int, int]] = None
    regions: Optional[Tensor] = None

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.height * self.width


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """View patch tokens of (B, prefix + h * w, C) as a feature map (B, C, h, w) in channels-last memory."""
    image = x[:, grid.prefix :].reshape(x.shape[0], grid.height, grid.width, x.shape[2]).permute(0, 3, 1, 2)
    return clone_if_dynamic(image)


def on_grid(conv, x: Tensor, grid: Grid) -> Tensor:
    """Apply ``conv``, a convolution of (B, C, h, w) maps, to the patch tokens of (B, N, C). Class tokens have no
    neighbours, so the result is zero there."""
    local = conv(to_map(x, grid)).permute(0, 2, 3, 1).flatten(1, 2)  # a view if the memory is channels-last
    return F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local
