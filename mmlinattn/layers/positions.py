# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Learned position encodings that are resized to other grids and windows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.positions import relative_index, resize_table, table_on
from ..ops.tokens import Grid, unflatten


class Table(nn.Module):
    """Base class of learned tables, which resize tables of other grids and windows on loading."""

    table_name: str

    def fit(self, table: Tensor) -> Tensor:
        """Resize a checkpoint's table to the grid or window of this module.

        A table that cannot be resized is returned unchanged, so that loading reports its shape.
        """
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        key = f'{prefix}{self.table_name}'
        if key in state_dict:
            state_dict[key] = self.fit(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *args)


class PositionTable(Table):
    """A learned vector for every token of a grid, returned by ``forward(grid)`` and resized bilinearly for other grids.

    The caller adds the vectors (1, N, C) to its tokens.

    Args:
        dim (int): Channels C.
        grid (tuple[int, int]): Height and width of the stored table.
        prefix (int): Leading class tokens; their vectors are never resized.
        std (float): Standard deviation of the initial table; 0 starts at zeros.
    """

    table_name = 'weight'

    def __init__(self, dim: int, grid: tuple[int, int], prefix: int = 0, std: float = 0.02) -> None:
        super().__init__()
        self.grid: tuple[int, int] = (grid[0], grid[1])
        self.prefix = prefix
        self.weight = nn.Parameter(torch.zeros(1, prefix + self.grid[0] * self.grid[1], dim))
        if std > 0:
            nn.init.trunc_normal_(self.weight, std=std)

    def fit(self, table: Tensor) -> Tensor:
        """Resize a checkpoint's table of a square grid, (1, prefix + n * n, C), to the shape of :attr:`weight`.

        Tables of another form are returned unchanged.
        """
        side = round(max(table.shape[1] - self.prefix, 0) ** 0.5) if table.dim() == 3 else 0
        if table.shape == self.weight.shape or not side or side**2 + self.prefix != table.shape[1]:
            return table
        return resize_table(table, (side, side), self.grid, self.prefix)

    def forward(self, grid: Grid) -> Tensor:
        """Return the vectors for the tokens of ``grid``, (1, grid.num_tokens, C); zero for class tokens without a
        stored vector."""
        return table_on(self.weight, self.grid, grid, self.prefix)


class RelativePositionBias(Table):
    """Swin's bias of the attention map: a learned value for each head and offset within a window.

    Args:
        window (tuple[int, int]): Largest window; smaller ones use the offsets they have.
        num_heads (int): Number of heads.

    Raises:
        ValueError: For a window of more than :attr:`max_tokens` tokens.
    """

    table_name = 'table'
    # N tokens have N^2 pairs: at 8192, each block has 512 MiB of index, and 256 MiB of bias for each head
    max_tokens = 8192

    def __init__(self, window: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.window = rows, columns = window[0], window[1]
        if rows * columns > self.max_tokens:
            raise ValueError(
                f'window_size={self.window}: a window with relative position bias may have {self.max_tokens} tokens at '
                f'most (90 x 90), not {rows * columns}; a linear attention takes larger ones'
            )
        self.table = nn.Parameter(torch.zeros((2 * rows - 1) * (2 * columns - 1), num_heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def fit(self, table: Tensor) -> Tensor:
        """Resize a table of a square window, ((2n - 1)^2, heads), bicubically as Swin's fine-tuning does."""
        side = round(table.shape[0] ** 0.5) if table.dim() == 2 else 0
        if table.shape == self.table.shape or not side or side**2 != table.shape[0]:
            return table
        size = tuple(2 * length - 1 for length in self.window)
        image = table.T.unflatten(1, (side, side))[None].float()
        image = F.interpolate(image, size=size, mode='bicubic', align_corners=False)
        return image[0].flatten(1).T.contiguous().to(table.dtype)

    def forward(self, height: int, width: int) -> Tensor:
        """Return the bias (heads, N, N) of a window of ``height`` x ``width``, at most as large as :attr:`window`.

        Smaller windows take a part of the table; nothing is interpolated.
        """
        index = relative_index(height, width, self.window, self.table)  # (N, N)
        return unflatten(self.table[index.flatten()], 0, index.shape).permute(2, 0, 1)
