# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Grid, rotary table and window masks of a stage, computed once for each forward pass for all of its blocks."""

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..ops.tokens import Grid, keep_count, masked_logit
from ..ops.windows import DynamicWindows, Windows


class MapWindows:
    """Windows of one feature map and their masks, made when a block first asks for them and shared with later blocks.

    Args:
        x (Tensor): The feature map, (B, H, W, C).
    """

    def __init__(self, x: Tensor) -> None:
        self.map = x
        self._made: dict[tuple, tuple] = {}

    def get(
        self, window, shift: bool = False
    ) -> tuple[Union[Windows, DynamicWindows], Optional[Tensor], Optional[Tensor]]:
        """Return the windows of the map and two masks of them, computed at the first call.

        Args:
            window (tuple[int | None, int | None], optional): Height and width of a window. None is a whole axis, or the
                whole map.
            shift (bool): Shift by half a window, as in Swin.

        Returns:
            tuple: The windows, and two masks:

                - valid tokens, (B * windows, N) bool, None without padding;
                - logits added between regions of a shifted map, (windows, 1, N, N), None without a shift.
        """
        key = (window, shift)
        if key not in self._made:
            height, width = self.map.shape[1:3]
            windows = Windows.fit(height, width, window, shift)
            region, hidden = windows.regions_of_tokens(self.map), None
            if region is not None:
                apart = region[:, :, None] != region[:, None, :]
                hidden = torch.zeros_like(apart, dtype=self.map.dtype)
                hidden = hidden.masked_fill(apart, masked_logit(self.map.dtype))[:, None]
            self._made[key] = windows, keep_count(windows.token_mask(self.map)), hidden
        return self._made[key]


class StageContext(NamedTuple):
    """Grid, rotary encoding and windows of a stage.

    Attributes:
        grid (Grid): Grid of the stage's tokens.
        rotary (Tensor, optional): Rotary encoding, see :func:`mmlinattn.ops.rotary_table`.
        windows (MapWindows, optional): Windows of the feature map, for attention in windows and stripes.
        source (Tensor, optional): Map or tokens to average for mixers with ``context``; by default the attention's
            input.
    """

    grid: Grid
    rotary: Optional[Tensor] = None
    windows: Optional[MapWindows] = None
    source: Optional[Tensor] = None

    @classmethod
    def of(cls, x: Tensor, rotary: Optional[Tensor] = None) -> 'StageContext':
        """Return the context of a feature map (B, H, W, C): its grid, its windows, and the given rotary encoding."""
        return cls(Grid(x.shape[1], x.shape[2]), rotary, MapWindows(x))
