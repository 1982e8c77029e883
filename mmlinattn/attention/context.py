# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The context that the blocks of a stage share, made once a forward pass."""

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ..ops.grid import Grid
from ..ops.padding import masked_logit
from ..ops.windows import DynamicWindows, Windows


class MapWindows:
    """The windows of one map with their masks, each kind made when a block first asks for it.

    Args:
        x (Tensor): The map, (B, H, W, C).
    """

    def __init__(self, x: Tensor) -> None:
        self.map = x
        self._made: dict[tuple, tuple] = {}

    def get(
        self, window, shift: bool = False
    ) -> tuple[Union[Windows, DynamicWindows], Optional[Tensor], Optional[Tensor]]:
        """Windows, mask of real tokens (B * windows, N) and additive mask of foreign regions (windows, 1, N, N)."""
        key = (window, shift)
        if key not in self._made:
            height, width = self.map.shape[1:3]
            windows = Windows.fit(height, width, window, shift)
            region, hidden = windows.regions_of_tokens(self.map), None
            if region is not None:
                apart = region[:, :, None] != region[:, None, :]
                hidden = torch.zeros_like(apart, dtype=self.map.dtype)
                hidden = hidden.masked_fill(apart, masked_logit(self.map.dtype))[:, None]
            self._made[key] = windows, windows.token_mask(self.map), hidden
        return self._made[key]


class StageContext(NamedTuple):
    """Grid, rotary encoding and windows of a stage.

    Attributes:
        grid (Grid): Their grid.
        rotary (Tensor, optional): Rotary encoding, see :func:`mmlinattn.ops.rotary_table`.
        windows (MapWindows, optional): Windows of the map, for windowed arrangements.
        source (Tensor, optional): Map or tokens for the mean that the mixer reads; by default the attention's input.
    """

    grid: Grid
    rotary: Optional[Tensor] = None
    windows: Optional[MapWindows] = None
    source: Optional[Tensor] = None

    @classmethod
    def of(cls, x: Tensor, rotary: Optional[Tensor] = None) -> 'StageContext':
        """The context of a map (B, H, W, C)."""
        return cls(Grid(x.shape[1], x.shape[2]), rotary, MapWindows(x))
