# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The grid that a sequence of tokens lies on."""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import Tensor

from . import dispatch
from .sizes import clone_if_open


class Grid(NamedTuple):
    """A sequence of tokens: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width of the window that this grid is the top left part of. Windows at the right and lower
    border are cropped to the map, but use the position table of a whole window. In graphs of dynamic sizes the grid is
    the larger one, with padding. Tables are resized to ``within`` either way.
    ``regions``: (windows, N), below 4, for the windows of a rolled map: tokens of different regions are no neighbours.
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
    """Patch tokens (B, prefix + h * w, C) as an (B, C, h, w) view in channels-last memory."""
    image = x[:, grid.prefix :].reshape(x.shape[0], grid.height, grid.width, x.shape[2]).permute(0, 3, 1, 2)
    return image if dispatch.state.settled else clone_if_open(image)


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h * w, C); a view when the memory is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def on_grid(conv, x: Tensor, grid: Grid) -> Tensor:
    """``conv``, a convolution of (B, C, h, w) maps, on the patch tokens of (B, N, C); zero at class tokens, without
    neighbours."""
    local = to_tokens(conv(to_map(x, grid)))
    return F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local
