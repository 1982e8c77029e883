# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tokens that live on a grid, and depth-wise convolutions of them."""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.sizes import to_image


class Grid(NamedTuple):
    """Where a sequence of tokens lives: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width of the window whose top left part this grid is. Windows at the right and lower border
    of a map end where the map does; position tables are those of the whole window. In graphs that leave
    sizes open, it is the grid that goes beyond, with padding; ``within`` is what tables are resized to either way.
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
    return to_image(x[:, grid.prefix :].unflatten(1, (grid.height, grid.width)))


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h * w, C); a view when the memory is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def add_local(out: Tensor, v: Tensor, conv, grid: Grid, watched: bool = False) -> Tensor:
    """Add a convolution of the value map to the patch tokens of ``out``; class tokens have no neighbours.

    Args:
        out (Tensor): (B, N, C); in inference it may be written over.
        v (Tensor): Values, (B, N, C).
        conv (Callable): Takes a map (B, C, h, w) and the map ``onto`` which it adds its result.
        grid (Grid): Where the tokens lie.
        watched (bool): Whether hooks see what ``conv`` gives: it is to be the convolution alone.

    Returns:
        Tensor: (B, N, C).
    """
    if not grid.prefix and not watched:
        return to_tokens(conv(to_map(v, grid), onto=to_map(out, grid)))
    local = to_tokens(conv(to_map(v, grid)))
    return out + (F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local)


def check_local_kernel(size: Optional[int]) -> Optional[int]:
    """``size`` itself, of a convolution that keeps the size of its map, or None for none.

    Raises:
        ValueError: For another one.
    """
    if size is not None and (type(size) is not int or size < 1 or size % 2 == 0):
        raise ValueError(f'local_kernel={size!r} has to be None or an odd int >= 1')
    return size


class DepthwiseConv2d(nn.Conv2d):
    """:func:`~mmlinattn.ops.depthwise_conv2d` with its weights.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor, onto: Optional[Tensor] = None) -> Tensor:
        return ops.depthwise_conv2d(x, self.weight, self.bias, onto)
