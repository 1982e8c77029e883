# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows over (B, H, W, C) maps: pad to whole windows, shift, partition, and back."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..ops import dispatch
from ..ops.dispatch import accumulation_dtype
from ..ops.sizes import as_tensor, is_known, round_up
from ..ops.tensors import settled
from .base import Grid


class Windows(NamedTuple):
    """How a map of ``height`` x ``width`` is cut.

    Attributes:
        height, width: The map.
        window: Height and width of a window.
        shift: Rows and columns that the (padded) map is rolled up and left by before cutting, as in Swin.
    """

    height: int
    width: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    @classmethod
    def fit(
        cls, height: int, width: int, window: Optional[tuple[Optional[int], Optional[int]]], shift: bool = False
    ) -> Union['Windows', 'OpenWindows']:
        """Windows of at most ``window`` (the whole map, or axis, where None), clipped to the map; no shift along an
        axis that holds a single window."""
        window = window or (None, None)
        if not is_known(height, width):
            return OpenWindows(height, width, window, shift)
        rows, columns = (size if length is None else min(length, size) for length, size in zip(window, (height, width)))
        steps = (rows // 2 if rows < height else 0, columns // 2 if columns < width else 0) if shift else (0, 0)
        return cls(height, width, (rows, columns), steps)

    @property
    def padded(self) -> tuple[int, int]:
        rows, columns = self.window
        return round_up(self.height, rows), round_up(self.width, columns)

    @property
    def counts(self) -> tuple[int, int]:
        return self.padded[0] // self.window[0], self.padded[1] // self.window[1]

    @property
    def is_whole(self) -> bool:
        """One window that is the map itself."""
        return self.window == (self.height, self.width)

    def grid(self, x: Tensor) -> Grid:
        """The grid of a window's tokens."""
        return Grid(*self.window)

    def partition(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B * windows, h * w, C), the windows of an image row by row."""
        if self.is_whole:
            return x.flatten(1, 2)
        height, width = self.padded
        if (height, width) != (self.height, self.width):
            x = F.pad(x, (0, 0, 0, width - self.width, 0, height - self.height))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        h, w = self.window
        return rearrange(x, 'b (rows h) (columns w) c -> (b rows columns) (h w) c', h=h, w=w)

    def merge(self, x: Tensor, batch: int = -1) -> Tensor:
        """(B * windows, h * w, C) -> (B, H, W, C), the inverse of :meth:`partition`.

        A graph of open sizes needs ``batch``, B: its exporter cannot divide by a symbol.
        """
        if self.is_whole:
            return x.unflatten(1, self.window)
        (rows, columns), (h, w) = self.counts, self.window
        pattern = '(b rows columns) (h w) c -> b (rows h) (columns w) c'
        x = rearrange(x, pattern, rows=rows, columns=columns, h=h, w=w)
        if any(self.shift):
            x = x.roll(self.shift, dims=(1, 2))
        return x[:, : self.height, : self.width]

    def mean(self, x: Tensor) -> Tensor:
        """Mean of the real tokens of each window of (B, H, W, C) without a shift, (B * windows, C)."""
        (rows, columns), (h, w) = self.counts, self.window
        height, width = self.padded
        if (height, width) != (self.height, self.width):
            x = F.pad(x, (0, 0, 0, width - self.width, 0, height - self.height))
        cut = x.unflatten(2, (columns, w)).unflatten(1, (rows, h))
        total = cut.sum(dim=(2, 4), dtype=accumulation_dtype(x)).flatten(1, 2)
        return (total / self.num_real(total)).flatten(0, 1).to(x.dtype)

    def num_real(self, like: Tensor) -> Tensor:
        """How many tokens of each window without a shift are no padding, (windows, 1)."""
        lengths = (
            (size - torch.arange(count, device=like.device, dtype=like.dtype) * length).clamp(max=length)
            for size, count, length in zip((self.height, self.width), self.counts, self.window)
        )
        return torch.outer(*lengths).flatten()[:, None]

    def regions(self) -> list['Region']:
        """Rows and columns of the map (without shift) whose windows are of one size, and those windows: the whole ones,
        and what is left of windows at the right and at the bottom. None pads."""
        return [
            (slice(top, bottom), slice(left, right), Windows(bottom - top, right - left, (rows, columns)))
            for top, bottom, rows in self._spans(0)
            for left, right, columns in self._spans(1)
        ]

    def _spans(self, axis: int) -> list[tuple[int, int, int]]:
        """First and last position and window of the whole windows of an axis, and of what is left."""
        size, window = (self.height, self.width)[axis], self.window[axis]
        whole = size - size % window
        return [(0, whole, window)] + [(whole, size, size - whole)] * (whole < size)

    def put(self, x: Tensor, out: Tensor) -> None:
        """Write windows (B * windows, h * w or 1, C) without a shift to their places in (B, H, W, C)."""
        (rows, columns), (h, w) = self.counts, self.window
        if self.padded != (self.height, self.width):
            out.copy_(self.merge(x.expand(-1, h * w, -1)))
            return
        places = out.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3)
        x = x.unflatten(1, (h, w) if x.shape[1] > 1 else (1, 1))
        places.copy_(x.unflatten(0, (-1, rows, columns)))

    def real(self, x: Tensor) -> Optional[Tensor]:
        """Which tokens of which window of ``x`` (B, H, W, C) are no padding: (B * windows, h * w) bool, None if all
        are real."""
        if self.padded == (self.height, self.width):
            return None
        real = torch.ones(1, self.height, self.width, 1, dtype=torch.bool, device=x.device)
        return self.partition(real)[..., 0].repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """Which part of the map each token of a shifted window comes from, (windows, N) int64 below 4; None without a
        shift.

        A rolled map brings the opposite borders together in the last windows of an axis; attention has to keep them
        apart (Swin, Fig. 4).
        """
        if not any(self.shift):
            return None
        rows, columns = (
            (torch.arange(size, device=x.device) >= size - shift).long() for size, shift in zip(self.padded, self.shift)
        )
        region = (2 * rows[:, None] + columns)[None, ..., None]
        return self._replace(height=self.padded[0], width=self.padded[1], shift=(0, 0)).partition(region)[..., 0]


# Rows and columns of a map, and the windows without a shift that they are cut into.
Region = tuple[slice, slice, Windows]


def cut(x: Tensor, regions: Sequence[Region], mean: bool = False) -> Iterator[Tensor]:
    """Of each of the regions that (B, H, W, C) consists of its windows, (B * windows, h * w, C), or their mean tokens,
    (B * windows, C). Their gradients are written into one map; of slices, each would fill a map of its own."""
    if dispatch.records() and x.requires_grad and not dispatch.is_plain(x):
        return iter(_Cut.apply(x, regions, mean))
    return _pieces(x, regions, mean)


def assemble(pieces: Iterable[Tensor], regions: Sequence[Region]) -> Tensor:
    """(B, H, W, C) from the windows of its regions, the inverse of :func:`cut`. In inference those of a region are
    written to their places before the next are asked for."""
    if dispatch.records():
        pieces = list(pieces)
        if not dispatch.is_plain(*pieces):
            return _Assembled.apply(regions, *pieces)
    return _assembled(pieces, regions)


def _pieces(x: Tensor, regions: Sequence[Region], mean: bool) -> Iterator[Tensor]:
    for rows, columns, part in regions:
        yield part.mean(x[:, rows, columns]) if mean else part.partition(x[:, rows, columns])


def _assembled(pieces: Iterable[Tensor], regions: Sequence[Region]) -> Tensor:
    out: Any = None
    for (rows, columns, part), windows in zip(regions, pieces):
        if out is None:
            batch = windows.shape[0] // (part.counts[0] * part.counts[1])
            last_rows, last_columns, _ = regions[-1]
            out = windows.new_empty(batch, last_rows.stop, last_columns.stop, windows.shape[-1])
        part.put(windows, out[:, rows, columns])
    return out


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, regions, mean):
        ctx.shape, ctx.regions, ctx.mean = x.shape, regions, mean
        return tuple(_pieces(x, regions, mean))

    @staticmethod
    def backward(ctx: Any, *grads):
        out = grads[0].new_empty(ctx.shape)
        for (rows, columns, part), grad in zip(ctx.regions, grads):
            if ctx.mean:
                grad = (grad.unflatten(0, (ctx.shape[0], -1)) / part.num_real(grad)).flatten(0, 1).unsqueeze(1)
            part.put(grad, out[:, rows, columns])
        return out, None, None


class _Assembled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, regions, *pieces):
        ctx.regions = regions
        return _assembled(pieces, regions)

    @staticmethod
    def backward(ctx: Any, grad):
        return None, *_pieces(grad, ctx.regions, False)


class OpenWindows:
    """:class:`Windows` of a map whose size a graph leaves open: one course of action for all sizes.

    Windows larger than the map are padded, not clipped, every window is masked, and the shift, 0 along an axis that
    holds one window, is a number the graph computes.

    Args:
        height, width: The map, symbols or tensors.
        window: Height and width of a window; None for the whole axis.
        shift (bool): Shift by half a window.
    """

    def __init__(self, height, width, window: tuple[Optional[int], Optional[int]], shift: bool = False) -> None:
        self.height, self.width = height, width
        self.axes = [Axis(size, length, shift) for size, length in zip((height, width), window)]

    @property
    def has_windows(self) -> bool:
        return any(axis.has_windows for axis in self.axes)

    @property
    def window(self) -> tuple:
        return tuple(axis.window for axis in self.axes)

    @property
    def counts(self) -> tuple:
        return tuple(axis.count for axis in self.axes)

    def grid(self, x: Tensor) -> Grid:
        """The grid of a window's tokens."""
        height, width = self.window
        return Grid(height, width, within=tuple(axis.clipped(x) for axis in self.axes))

    def partition(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B * windows, h * w, C), the windows of an image row by row."""
        rows, columns = self.axes
        if not self.has_windows:
            return x.flatten(1, 2)
        x = F.pad(x, (0, 0, 0, columns.padded - columns.size, 0, rows.padded - rows.size))
        for dim, axis in enumerate(self.axes, 1):
            if axis.shifts:
                x = x.index_select(dim, axis.turned(1, x))
        # not einops: what it permutes and flattens in one go has to be settled in between
        x = x.unflatten(2, (columns.count, columns.window)).unflatten(1, (rows.count, rows.window))
        return settled(x.transpose(2, 3)).flatten(0, 2).flatten(1, 2)

    def merge(self, x: Tensor, batch: int = -1) -> Tensor:
        """As :meth:`Windows.merge`."""
        if not self.has_windows:
            return x.unflatten(1, self.window)
        x = settled(x.unflatten(1, self.window).unflatten(0, (batch, *self.counts)).transpose(2, 3))
        x = x.flatten(3, 4).flatten(1, 2)
        for dim, axis in enumerate(self.axes, 1):
            if axis.has_windows:
                # of a slice, exporters would have to prove that it is not longer than what it is cut from
                x = x.index_select(dim, axis.turned(-1, x))
        return x

    def real(self, x: Tensor) -> Optional[Tensor]:
        """Which tokens of which window of ``x`` (B, H, W, C) are no padding: (B * windows, h * w) bool, None where no
        size pads."""
        if not self.has_windows:
            return None
        rows, columns = ((axis.turned(1, x, by_window=True) < axis.size) for axis in self.axes)
        real = rows[:, None, :, None] & columns[None, :, None, :]
        return real.flatten(2).flatten(0, 1).repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """As :meth:`Windows.regions_of_tokens`; None where nothing shifts at any size."""
        if not any(axis.shifts for axis in self.axes):
            return None
        rows, columns = (axis.region(x) for axis in self.axes)
        return (2 * rows[:, None, :, None] + columns[None, :, None, :]).flatten(2).flatten(0, 1)


class Axis:
    """Rows or columns of :class:`OpenWindows`: ``size`` of them in windows of ``window`` (None: one, of all)."""

    def __init__(self, size, window: Optional[int], shift: bool) -> None:
        self.size = size
        self.has_windows = window is not None
        self.shifts = shift and self.has_windows
        self.window = size if window is None else window
        self.padded = size if window is None else round_up(size, window)
        self.count = 1 if window is None else self.padded // window

    def clipped(self, x: Tensor):
        """The window, or what it has of a map that is smaller."""
        return as_tensor(self.size, x, torch.long).clamp(max=self.window) if self.has_windows else self.size

    def shift(self, x: Tensor) -> Tensor:
        is_several = as_tensor(self.size, x, torch.long) > self.window
        return is_several.long() * (self.window // 2)

    def positions(self, x: Tensor) -> Tensor:
        """The padded positions, (windows, length of a window)."""
        first = torch.arange(self.count, device=x.device) * self.window
        return first[:, None] + torch.arange(self.window, device=x.device)

    def turned(self, direction: int, x: Tensor, by_window: bool = False) -> Tensor:
        """Positions before the shift (1) of the padded positions, or after it (-1) of those of the map."""
        length = self.padded if direction == 1 else self.size
        position = self.positions(x) if by_window else torch.arange(length, device=x.device)
        if not self.shifts:
            return position
        moved = position + direction * self.shift(x)
        return moved + self.padded * ((moved < 0).long() - (moved >= self.padded).long())  # not every exporter knows %

    def region(self, x: Tensor) -> Tensor:
        """Which padded positions were at the other end before the shift, 1 there and 0 elsewhere, as positions."""
        position = self.positions(x)
        return (position >= self.padded - self.shift(x)).long() if self.shifts else position * 0
