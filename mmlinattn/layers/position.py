# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.tensors import accumulation_dtype, as_tensor, is_known, unflatten


def resize_table(table: Tensor, grid: tuple[int, int], size: tuple[int, int], prefix: int = 0) -> Tensor:
    """(1, prefix + grid, C) -> (1, prefix + size, C), bilinear with ``align_corners=False``; class tokens stay."""
    image = unflatten(table[:, prefix:], 1, grid).permute(0, 3, 1, 2)
    # in float32: neither CPU nor CUDA interpolates every half type
    wide = accumulation_dtype(image)
    image = F.interpolate(image.to(wide), size=tuple(size), mode='bilinear', align_corners=False).to(table.dtype)
    return torch.cat((table[:, :prefix], image.flatten(2).transpose(1, 2)), dim=1)


def bilinear_weights(length: int, count, size, like: Tensor) -> Tensor:
    """Matrix (count, length) that resizes ``length`` values to ``size``, as :func:`resize_table` does along an axis.

    Positions from ``size`` on, where ``count`` is larger, get the last value. ``count`` and ``size`` may be open sizes
    of a graph (:mod:`mmlinattn.ops.tensors`).
    """
    wide = accumulation_dtype(like)
    centres = torch.arange(count, dtype=wide, device=like.device) + 0.5
    source = (centres * (length / as_tensor(size, like, wide)) - 0.5).clamp(0, length - 1)
    return (1 - (source[:, None] - torch.arange(length, dtype=wide, device=like.device)).abs()).clamp(min=0)


class PositionTable(nn.Module):
    """A learned vector for every token of a grid, resized bilinearly to other grids.

    Args:
        dim (int): Width C.
        grid (tuple[int, int]): Height and width of the stored table.
        prefix (int): Class tokens in front, whose vectors are never resized.

    At the stored grid the table is added as it is.
    """

    def __init__(self, dim: int, grid: tuple[int, int], prefix: int = 0) -> None:
        super().__init__()
        self.grid: tuple[int, int] = (grid[0], grid[1])
        self.prefix = prefix
        self.weight = nn.Parameter(torch.zeros(1, prefix + self.grid[0] * self.grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def resized(self, height: int, width: int) -> Tensor:
        """The table for a grid of ``height`` x ``width``, (1, prefix + height * width, C)."""
        if (height, width) == self.grid:
            return self.weight
        return resize_table(self.weight, self.grid, (height, width), self.prefix)

    def resized_in_graph(self, grid) -> Tensor:
        """The table for a grid of open size, (1, prefix + height * width, C): resized at every size, also at that of
        the table, where nothing changes."""
        sizes = grid.within or grid[:2]
        rows, columns = (bilinear_weights(*axis, self.weight) for axis in zip(self.grid, grid[:2], sizes))
        image = unflatten(self.weight[0, self.prefix :], 0, self.grid).to(rows.dtype)
        image = torch.einsum('hi,wj,ijc->hwc', rows, columns, image).flatten(0, 1).to(self.weight.dtype)
        return torch.cat((self.weight[:, : self.prefix], image[None]), dim=1)

    def adapt_state(self, state: dict, prefix: str) -> None:
        """Resize the table in a state dict to this grid, in place."""
        key = f'{prefix}weight'
        if key in state:
            state[key] = self.fit(state[key])

    def fit(self, weight: Tensor) -> Tensor:
        """A checkpoint's table, (1, prefix + n * n, C), for this grid; of another form it stays as it is, for the
        report."""
        side = round(max(weight.shape[1] - self.prefix, 0) ** 0.5) if weight.dim() == 3 else 0
        if weight.shape == self.weight.shape or not side or side**2 + self.prefix != weight.shape[1]:
            return weight
        return resize_table(weight, (side, side), self.grid, self.prefix)

    def on(self, grid) -> Tensor:
        """The table for the tokens of a :class:`~mmlinattn.ops.grid.Grid`, (1, prefix + height * width, C); zero for
        class tokens that the table has no vectors for."""
        if not is_known(*grid[:2], *(grid.within or ())):
            table = self.resized_in_graph(grid)
        else:
            table = self.resized(*(grid.within or grid[:2]))
            if grid.within:
                table = unflatten(table, 1, grid.within)[:, : grid.height, : grid.width].flatten(1, 2)
        if grid.prefix > self.prefix:
            table = F.pad(table, (0, 0, grid.prefix - self.prefix, 0))
        return table

    def add_to(self, x: Tensor, grid) -> Tensor:
        """``x`` (B, prefix + height * width, C) plus the table of its :class:`~mmlinattn.ops.grid.Grid`."""
        return x + self.on(grid).to(x.dtype)
