# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor, nn

from ..ops.grid import Grid
from ..ops.maps import resize_table, table_on


class PositionTable(nn.Module):
    """A learned vector for every token of a grid, resized bilinearly to other grids.

    Args:
        dim (int): Width C.
        grid (tuple[int, int]): Height and width of the stored table.
        prefix (int): Leading class tokens; their vectors are never resized.

    At the stored grid the table is added as it is.
    """

    def __init__(self, dim: int, grid: tuple[int, int], prefix: int = 0) -> None:
        super().__init__()
        self.grid: tuple[int, int] = (grid[0], grid[1])
        self.prefix = prefix
        self.weight = nn.Parameter(torch.zeros(1, prefix + self.grid[0] * self.grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

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

    def forward(self, grid: Grid) -> Tensor:
        """The table for the tokens of a grid, (1, prefix + height * width, C); zero for class tokens that the table has
        no vectors for."""
        return table_on(self.weight, self.grid, grid, self.prefix)
