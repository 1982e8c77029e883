# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows over (B, H, W, C) maps: pad to whole windows, shift, partition, and back."""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


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
    def fit(cls, height: int, width: int, window: Optional[tuple[int, int]], shift: bool = False) -> 'Windows':
        """Windows of at most ``window`` (the whole map where None), clipped to the map; no shift along an axis that
        holds a single window."""
        rows, columns = (height, width) if window is None else (min(window[0], height), min(window[1], width))
        steps = (rows // 2 if rows < height else 0, columns // 2 if columns < width else 0) if shift else (0, 0)
        return cls(height, width, (rows, columns), steps)

    @property
    def padded(self) -> tuple[int, int]:
        rows, columns = self.window
        return -(-self.height // rows) * rows, -(-self.width // columns) * columns

    @property
    def counts(self) -> tuple[int, int]:
        return self.padded[0] // self.window[0], self.padded[1] // self.window[1]

    @property
    def is_whole(self) -> bool:
        """One window that is the map itself."""
        return self.window == (self.height, self.width)

    def partition(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B * windows, h * w, C), the windows of an image row by row."""
        if self.is_whole:
            return x.flatten(1, 2)
        height, width = self.padded
        if (height, width) != (self.height, self.width):
            x = F.pad(x, (0, 0, 0, width - self.width, 0, height - self.height))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        x = x.unflatten(2, (-1, self.window[1])).unflatten(1, (-1, self.window[0]))
        return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(B * windows, h * w, C) -> (B, H, W, C), the inverse of :meth:`partition`."""
        if self.is_whole:
            return x.unflatten(1, self.window)
        x = x.unflatten(1, self.window).unflatten(0, (-1, *self.counts)).transpose(2, 3)
        x = x.flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            x = x.roll(self.shift, dims=(1, 2))
        return x[:, : self.height, : self.width]

    def regions(self) -> list[tuple[slice, slice, 'Windows']]:
        """Rows and columns of the map (without shift) whose windows are of one size, and those windows: the whole ones,
        and what is left of windows at the right and at the bottom. None pads."""
        axes = []
        for size, window in zip((self.height, self.width), self.window):
            whole = size - size % window
            axes.append([(0, whole, window)] + [(whole, size, size - whole)] * (whole < size))
        return [
            (slice(top, bottom), slice(left, right), Windows(bottom - top, right - left, (rows, columns)))
            for top, bottom, rows in axes[0]
            for left, right, columns in axes[1]
        ]

    def real(self, batch: int, device) -> Optional[Tensor]:
        """Which tokens of which window are no padding: (B * windows, h * w) bool, None if all are real."""
        if self.padded == (self.height, self.width):
            return None
        real = torch.ones(1, self.height, self.width, 1, dtype=torch.bool, device=device)
        return self.partition(real)[..., 0].repeat(batch, 1)

    def same_region(self, device) -> Optional[Tensor]:
        """Which pairs of tokens of a shifted window were neighbours before the shift: (windows, N, N) bool.

        A rolled map brings the opposite borders together in the last windows of an axis; attention has to keep them
        apart (Swin, Fig. 4). None without a shift.
        """
        if not any(self.shift):
            return None
        region = self._region_of_tokens(device)
        return region[:, :, None] == region[:, None, :]

    def region_index(self, device) -> Optional[Tensor]:
        """Which of the up to four regions of its window a token belongs to, (windows, N) int64; None without a
        shift."""
        if not any(self.shift):
            return None
        region = self._region_of_tokens(device)
        return region // 3 // 2 * 2 + region % 3 // 2  # 0 and 1 along an axis are windows apart

    def _region_of_tokens(self, device) -> Tensor:
        axes = []
        for size, window, shift in zip(self.padded, self.window, self.shift):
            position = torch.arange(size, device=device)
            axes.append(
                (position >= size - window).long() + (position >= size - shift).long() if shift else position * 0
            )
        region = (axes[0][:, None] * 3 + axes[1])[None, ..., None]
        return self._replace(height=self.padded[0], width=self.padded[1], shift=(0, 0)).partition(region)[..., 0]
