# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows over (B, H, W, C) feature maps: padding to whole windows, cyclic shift, partition, and the inverse."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from . import dispatch
from .tokens import Grid, Size, arange, as_tensor, clone_if_dynamic, is_known, round_up, unflatten


class Windows(NamedTuple):
    """Partition of a feature map of ``height`` x ``width`` into windows, after padding and a cyclic shift.

    Attributes:
        height, width: Size of the feature map.
        window: Height and width of a window.
        shift: Rows and columns by which the padded feature map is rolled up and left before the partition, as in Swin.
    """

    height: int
    width: int
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    @classmethod
    def fit(
        cls, height: int, width: int, window: Optional[tuple[Optional[int], Optional[int]]], shift: bool = False
    ) -> Union['Windows', 'DynamicWindows']:
        """Return windows of at most ``window``, cropped to the map; :class:`DynamicWindows` for a map of dynamic size.

        ``window`` is (height, width); None is the whole map, None in the tuple the whole axis. ``shift`` moves windows
        by half their size, but not along an axis with a single window.
        """
        window = window or (None, None)
        if not is_known(height, width):
            return DynamicWindows(height, width, window, shift)
        rows, columns = (size if length is None else min(length, size) for length, size in zip(window, (height, width)))
        steps = (rows // 2 if rows < height else 0, columns // 2 if columns < width else 0) if shift else (0, 0)
        return cls(height, width, (rows, columns), steps)

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the feature map after padding to whole windows."""
        rows, columns = self.window
        return round_up(self.height, rows), round_up(self.width, columns)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of windows along height and width."""
        return self.padded[0] // self.window[0], self.padded[1] // self.window[1]

    @property
    def is_whole(self) -> bool:
        """True if a single window is the feature map itself."""
        return self.window == (self.height, self.width)

    def grid(self, x: Tensor) -> Grid:
        """Return the grid of the tokens of one window."""
        return Grid(*self.window)

    def partition(self, x: Tensor) -> Tensor:
        """Pad, shift and cut a map: (B, H, W, C) -> (B * windows, h * w, C), the windows of an image row by row."""
        if self.is_whole:
            return x.flatten(1, 2)
        height, width = self.padded
        if (height, width) != (self.height, self.width):
            if not any(self.shift) and dispatch.writes_in_place(x):
                return self._pad_and_partition(x)
            x = F.pad(x, (0, 0, 0, width - self.width, 0, height - self.height))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        h, w = self.window
        return rearrange(x, 'b (rows h) (columns w) c -> (b rows columns) (h w) c', h=h, w=w)

    def partition_qkv(self, x: Tensor, widths: tuple[int, ...]) -> Sequence[Tensor]:
        """Cut concatenated queries, keys and values, (B, H, W, sum of ``widths``), into windows.

        On CPUs without gradients, values of padded maps are copied separately, so a convolution of them needs no copy.

        Returns:
            tuple[Tensor, Tensor, Tensor]: Queries, keys and values, each as from :meth:`partition`.
        """
        q, k, v = widths
        is_padded = self.padded != (self.height, self.width) and not any(self.shift)
        if not is_padded or not dispatch.writes_in_place(x):
            return self.partition(x).split(widths, dim=-1)
        pair, values = (self._pad_and_partition(part) for part in x.split((q + k, v), dim=-1))
        return *pair.split((q, k), dim=-1), values

    def merge(self, x: Tensor, batch: int = -1) -> Tensor:
        """Invert :meth:`partition`: (B * windows, h * w, C) -> (B, H, W, C). ``batch`` = B is used by
        :class:`DynamicWindows` alone: exporters cannot divide by a symbolic size."""
        if self.is_whole:
            return unflatten(x, 1, self.window)
        (rows, columns), (h, w) = self.counts, self.window
        if self.padded != (self.height, self.width) and not any(self.shift) and dispatch.writes_in_place(x):
            return self._merge_and_crop(x)
        pattern = '(b rows columns) (h w) c -> b (rows h) (columns w) c'
        x = rearrange(x, pattern, rows=rows, columns=columns, h=h, w=w)
        if any(self.shift):
            x = x.roll(self.shift, dims=(1, 2))
        return x[:, : self.height, : self.width]

    def _pad_and_partition(self, x: Tensor) -> Tensor:
        """Compute :meth:`partition` by one copy, without a padded feature map."""
        (rows, columns), (h, w) = self.counts, self.window
        out = x.new_empty(x.shape[0], rows, columns, h, w, x.shape[3])
        out[:, -1, :, h - (self.padded[0] - self.height) :] = 0
        out[:, :, -1, :, w - (self.padded[1] - self.width) :] = 0
        for windows, region in self._regions(out, x):
            windows.copy_(region)
        return out.flatten(0, 2).flatten(1, 2)

    def _merge_and_crop(self, x: Tensor) -> Tensor:
        """Compute :meth:`merge` by one copy, without a padded feature map."""
        out = x.new_empty(x.shape[0] // math.prod(self.counts), self.height, self.width, x.shape[2])
        for windows, region in self._regions(x.unflatten(1, self.window).unflatten(0, (-1, *self.counts)), out):
            region.copy_(windows)
        return out

    def _regions(self, windows: Tensor, image: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the windows (B, rows, columns, h, w, C) and of the map (B, H, W, C) that hold the same pixels:
        whole windows, and the partial ones at the right and bottom."""
        for row, top, h in _spans(self.height, self.window[0]):
            for column, left, w in _spans(self.width, self.window[1]):
                region = image[:, top][:, :, left].unflatten(2, (-1, w)).unflatten(1, (-1, h)).transpose(2, 3)
                yield windows[:, row, column, :h, :w], region

    def token_mask(self, x: Tensor) -> Optional[Tensor]:
        """Return the mask of the valid tokens of each window of ``x`` (B, H, W, C), (B * windows, h * w) bool; None
        without padding."""
        if self.padded == (self.height, self.width):
            return None
        real = torch.ones(1, self.height, self.width, 1, dtype=torch.bool, device=x.device)
        return self.partition(real)[..., 0].repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """Return the region of the map, 0 to 3, from which each token of a shifted window comes: (windows, N) int64.
        Without a shift the result is None.

        After the cyclic shift, the last windows of an axis hold tokens of opposite borders. Attention must not mix
        these regions (Swin, Fig. 4).
        """
        if not any(self.shift):
            return None
        rows, columns = (
            (torch.arange(size, device=x.device) >= size - shift).long() for size, shift in zip(self.padded, self.shift)
        )
        region = (2 * rows[:, None] + columns)[None, ..., None]
        return self._replace(height=self.padded[0], width=self.padded[1], shift=(0, 0)).partition(region)[..., 0]


def _spans(size: int, window: int) -> list[tuple[slice, slice, int]]:
    """Split an axis of ``size`` pixels into its whole windows and, if there is one, the partial window at the end. Each
    entry has a slice of window numbers, the slice of pixels in these windows, and the length of each window. Size 10
    and window 4 give (0:2, 0:8, 4) and (2:, 8:10, 2)."""
    count, rest = divmod(size, window)
    spans = [(slice(0, count), slice(0, size - rest), window)]
    return spans if not rest else [*spans, (slice(count, None), slice(size - rest, size), rest)]


class DynamicWindows:
    """:class:`Windows` for tracing and export of feature maps of dynamic size, with the same operations at every size.

    Windows larger than the feature map are padded instead of cropped, and every window has a mask. The shift is
    computed in the traced graph, as it is 0 along an axis with a single window.

    Args:
        height, width: Size of the feature map.
        window: Height and width of a window; None for the whole axis.
        shift (bool): Shift by half a window.
    """

    def __init__(
        self, height: Size, width: Size, window: tuple[Optional[int], Optional[int]], shift: bool = False
    ) -> None:
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
        """Return the grid of the tokens of one window."""
        height, width = self.window
        return Grid(height, width, within=tuple(axis.clipped_length(x) for axis in self.axes))

    def partition(self, x: Tensor) -> Tensor:
        """Pad, shift and cut a map: (B, H, W, C) -> (B * windows, h * w, C), the windows of an image row by row."""
        rows, columns = self.axes
        if not self.has_windows:
            return x.flatten(1, 2)
        x = F.pad(x, (0, 0, 0, columns.padded - columns.size, 0, rows.padded - rows.size))
        for dim, axis in enumerate(self.axes, 1):
            if axis.shifts:
                x = x.index_select(dim, axis.shifted(1, x))
        # not einops: `clone_if_dynamic` has to run between its permutation and its reshape
        x = unflatten(unflatten(x, 2, (columns.count, columns.window)), 1, (rows.count, rows.window))
        return clone_if_dynamic(x.transpose(2, 3)).flatten(0, 2).flatten(1, 2)

    def partition_qkv(self, x: Tensor, widths: tuple[int, ...]) -> Sequence[Tensor]:
        """Cut queries, keys and values as :meth:`Windows.partition_qkv` does."""
        return self.partition(x).split(widths, dim=-1)

    def merge(self, x: Tensor, batch: int = -1) -> Tensor:
        """Invert :meth:`partition`, as :meth:`Windows.merge` does."""
        if not self.has_windows:
            return unflatten(x, 1, self.window)
        x = clone_if_dynamic(unflatten(unflatten(x, 1, self.window), 0, (batch, *self.counts)).transpose(2, 3))
        x = x.flatten(3, 4).flatten(1, 2)
        for dim, axis in enumerate(self.axes, 1):
            if axis.has_windows:
                # not a slice: exporters would have to prove that it is not longer than the feature map
                x = x.index_select(dim, axis.shifted(-1, x))
        return x

    def token_mask(self, x: Tensor) -> Optional[Tensor]:
        """Return the mask of the valid tokens of each window of ``x`` (B, H, W, C), (B * windows, h * w) bool. The
        result is None if a single window is the feature map at every size."""
        if not self.has_windows:
            return None
        rows, columns = ((axis.shifted(1, x, by_window=True) < axis.size) for axis in self.axes)
        real = rows[:, None, :, None] & columns[None, :, None, :]
        return real.flatten(2).flatten(0, 1).repeat(x.shape[0], 1)

    def regions_of_tokens(self, x: Tensor) -> Optional[Tensor]:
        """Return the regions as :meth:`Windows.regions_of_tokens` does; None if the attention has no shift."""
        if not any(axis.shifts for axis in self.axes):
            return None
        rows, columns = (axis.region(x) for axis in self.axes)
        return (2 * rows[:, None, :, None] + columns[None, :, None, :]).flatten(2).flatten(0, 1)


class Axis:
    """One axis of :class:`DynamicWindows`: ``size`` positions in windows of length ``window``; None is one window.

    ``shift``: windows move by half their length. The argument ``x`` of the methods gives only the device.
    """

    def __init__(self, size: Size, window: Optional[int], shift: bool) -> None:
        self.size = size
        self.has_windows = window is not None
        self.shifts = shift and self.has_windows
        self.window = size if window is None else window
        self.padded = size if window is None else round_up(size, window)
        self.count = 1 if window is None else self.padded // window

    def clipped_length(self, x: Tensor) -> Size:
        """Return the length of a window, at most the size of the feature map."""
        return as_tensor(self.size, x, torch.long).clamp(max=self.window) if self.has_windows else self.size

    def shift(self, x: Tensor) -> Tensor:
        """Return the number of positions by which the axis is shifted, 0-d int64: 0 for a single window."""
        is_several = as_tensor(self.size, x, torch.long) > self.window
        return is_several.long() * (self.window // 2)

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions along the padded axis, window by window: (windows, length of a window) int64."""
        return (arange(self.count, x) * self.window)[:, None] + arange(self.window, x)

    def shifted(self, direction: int, x: Tensor, by_window: bool = False) -> Tensor:
        """Return the indices that select the shifted axis (``direction`` 1), or undo the shift on the map (-1). The
        shape is (positions,), with ``by_window`` that of :meth:`positions`."""
        length = self.padded if direction == 1 else self.size
        position = self.positions(x) if by_window else arange(length, x)
        if not self.shifts:
            return position
        moved = position + direction * self.shift(x)
        return moved + self.padded * ((moved < 0).long() - (moved >= self.padded).long())  # not every exporter knows %

    def region(self, x: Tensor) -> Tensor:
        """Return the region of each position for the mask of shifted windows, (windows, window length) int64.

        The region is 1 if the cyclic shift moved the position from the other end of the axis, else 0. ``x`` is a tensor
        on the device of the result.
        """
        position = self.positions(x)
        return (position >= self.padded - self.shift(x)).long() if self.shifts else position * 0
