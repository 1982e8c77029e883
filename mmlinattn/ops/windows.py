# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows over (B, H, W, C) maps: pad to whole windows, shift, partition, and back."""

from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .grid import Grid
from .sizes import as_tensor, clone_if_open, is_known, round_up, unflatten


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
    ) -> Union['Windows', 'DynamicWindows']:
        """Windows of at most ``window``, clipped to the map; None is the whole map or axis. Single windows are not
        shifted."""
        window = window or (None, None)
        if not is_known(height, width):
            return DynamicWindows(height, width, window, shift)
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
            return unflatten(x, 1, self.window)
        (rows, columns), (h, w) = self.counts, self.window
        pattern = '(b rows columns) (h w) c -> b (rows h) (columns w) c'
        x = rearrange(x, pattern, rows=rows, columns=columns, h=h, w=w)
        if any(self.shift):
            x = x.roll(self.shift, dims=(1, 2))
        return x[:, : self.height, : self.width]

    def token_mask(self, x: Tensor) -> Optional[Tensor]:
        """Mask of the real tokens of each window of ``x`` (B, H, W, C): (B * windows, h * w) bool, None without
        padding."""
        if self.padded == (self.height, self.width):
            return None
        real = torch.ones(1, self.height, self.width, 1, dtype=torch.bool, device=x.device)
        return self.partition(real)[..., 0].repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """Region of the map that each token of a shifted window comes from, (windows, N) int64 below 4; None without a
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


class DynamicWindows:
    """:class:`Windows` of a map of dynamic size: the same operations at every size.

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
                x = x.index_select(dim, axis.shifted(1, x))
        # not einops: `clone_if_open` has to run between its permutation and its reshape
        x = unflatten(unflatten(x, 2, (columns.count, columns.window)), 1, (rows.count, rows.window))
        return clone_if_open(x.transpose(2, 3)).flatten(0, 2).flatten(1, 2)

    def merge(self, x: Tensor, batch: int = -1) -> Tensor:
        """As :meth:`Windows.merge`."""
        if not self.has_windows:
            return unflatten(x, 1, self.window)
        x = clone_if_open(unflatten(unflatten(x, 1, self.window), 0, (batch, *self.counts)).transpose(2, 3))
        x = x.flatten(3, 4).flatten(1, 2)
        for dim, axis in enumerate(self.axes, 1):
            if axis.has_windows:
                # not a slice: exporters would have to prove that it is not longer than the map
                x = x.index_select(dim, axis.shifted(-1, x))
        return x

    def token_mask(self, x: Tensor) -> Optional[Tensor]:
        """Mask of the real tokens of each window of ``x`` (B, H, W, C): (B * windows, h * w) bool, None if no size
        pads."""
        if not self.has_windows:
            return None
        rows, columns = ((axis.shifted(1, x, by_window=True) < axis.size) for axis in self.axes)
        real = rows[:, None, :, None] & columns[None, :, None, :]
        return real.flatten(2).flatten(0, 1).repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """As :meth:`Windows.regions_of_tokens`; None if nothing shifts at any size."""
        if not any(axis.shifts for axis in self.axes):
            return None
        rows, columns = (axis.region(x) for axis in self.axes)
        return (2 * rows[:, None, :, None] + columns[None, :, None, :]).flatten(2).flatten(0, 1)


class Axis:
    """Rows or columns of :class:`DynamicWindows`: ``size`` of them in windows of ``window`` (None: one, of all)."""

    def __init__(self, size, window: Optional[int], shift: bool) -> None:
        self.size = size
        self.has_windows = window is not None
        self.shifts = shift and self.has_windows
        self.window = size if window is None else window
        self.padded = size if window is None else round_up(size, window)
        self.count = 1 if window is None else self.padded // window

    def clipped(self, x: Tensor):
        """The window, cropped to a smaller map."""
        return as_tensor(self.size, x, torch.long).clamp(max=self.window) if self.has_windows else self.size

    def shift(self, x: Tensor) -> Tensor:
        is_several = as_tensor(self.size, x, torch.long) > self.window
        return is_several.long() * (self.window // 2)

    def positions(self, x: Tensor) -> Tensor:
        """The padded positions, (windows, length of a window)."""
        first = torch.arange(self.count, device=x.device) * self.window
        return first[:, None] + torch.arange(self.window, device=x.device)

    def shifted(self, direction: int, x: Tensor, by_window: bool = False) -> Tensor:
        """Positions before the shift (1) of the padded positions, or after it (-1) of those of the map."""
        length = self.padded if direction == 1 else self.size
        position = self.positions(x) if by_window else torch.arange(length, device=x.device)
        if not self.shifts:
            return position
        moved = position + direction * self.shift(x)
        return moved + self.padded * ((moved < 0).long() - (moved >= self.padded).long())  # not every exporter knows %

    def region(self, x: Tensor) -> Tensor:
        """1 for padded positions that the shift brought from the other end, else 0."""
        position = self.positions(x)
        return (position >= self.padded - self.shift(x)).long() if self.shifts else position * 0
