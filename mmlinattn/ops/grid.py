# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The grid of a token sequence, and conversion between tokens and maps."""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import Tensor

from .sizes import clone_if_open


class Grid(NamedTuple):
    """Layout of a token sequence: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width to which position tables are resized, if they differ from ``height`` and ``width``. A
    window that is cropped at the right or lower border uses the table of the whole window, from its top left. In graphs
    of dynamic sizes the grid of a window includes padding, and ``within`` is the window cropped to the map.
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
    """View patch tokens of (B, prefix + h * w, C) as a map (B, C, h, w) in channels-last memory."""
    image = x[:, grid.prefix :].reshape(x.shape[0], grid.height, grid.width, x.shape[2]).permute(0, 3, 1, 2)
    return clone_if_open(image)


def on_grid(conv, x: Tensor, grid: Grid) -> Tensor:
    """Apply ``conv``, a convolution of (B, C, h, w) maps, to the patch tokens of (B, N, C). Class tokens have no
    neighbours, so the result is zero there."""
    local = conv(to_map(x, grid)).permute(0, 2, 3, 1).flatten(1, 2)  # a view if the memory is channels-last
    return F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local
