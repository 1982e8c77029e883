# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..layers.positions import PositionTable
from ..ops.tokens import on_grid
from .mixer import TOKEN_MIXERS, LocalMixer, RepeatedConv2d, check_local_kernel


@TOKEN_MIXERS.register_module('focused')
class FocusedMixer(LocalMixer):
    """Focused linear attention (FLatten Eq. 5-12).

    Args:
        dim (int): Channels C.
        num_heads (int): Number of heads.
        grid (tuple[int, int], optional): Height and width of the stored position table of the keys, resized for other
            grids. None leaves the table out.
        power (float): Focusing factor p, in [1, 32].
        local_kernel (int, optional): Size of the depth-wise convolution of the values, its weights shared by the heads
            (Eq. 12); None for none (Tab. 4).
        focus (bool): False takes plain linear attention with the ReLU kernel (Tab. 4).

    Raises:
        ValueError: For a power out of range, or a ``local_kernel`` that is not odd.
    """

    position_table = True

    def __init__(
        self, dim: int, num_heads: int, grid=None, power: float = 3, local_kernel=5, focus: bool = True, init_cfg=None
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        if not isinstance(power, (int, float)) or not 1 <= power <= 32:
            raise ValueError(f'power={power} (focusing factor): expected a value in [1, 32]')
        self.power = power
        self.focus = focus
        self.position = PositionTable(dim, grid, std=0.0) if grid is not None else None
        self.scale = nn.Parameter(torch.zeros(dim)) if focus else None
        self.local: Any = None
        if check_local_kernel(local_kernel):
            self.local = RepeatedConv2d(self.head_dim, num_heads, (local_kernel, local_kernel))

    def attend(self, q, k, v, key_grid, mask=None) -> Tensor:
        offset = None if self.position is None else self.position(key_grid)
        if self.scale is not None:
            inverse_scale = 1 / F.softplus(self.scale)
            return ops.focused_attention(q, k, v, self.num_heads, inverse_scale, self.power, offset, mask)
        k = k if offset is None else k + offset.to(k.dtype)
        return ops.linear_attention(q.relu() + 1e-6, k.relu() + 1e-6, v, self.num_heads, mask=mask)

    def convolve(self, v, key_grid, context=None):
        return None if self.local is None else on_grid(self.local, v, key_grid)
