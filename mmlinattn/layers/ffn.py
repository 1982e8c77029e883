# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..attention.base import scaled_linear
from .position import ResidualDWConv


class MLP(BaseModule):
    """Feed-forward network on (..., C): linear, GELU, linear.

    Args:
        dim (int): Width C.
        hidden_dim (int): Width of the hidden layer.
    """

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class ConvFFN(MLP):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear. Arguments as
    :class:`MLP`."""

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = ResidualDWConv(hidden_dim)

    def forward(self, x: Tensor, out_scale: Optional[Tensor] = None) -> Tensor:
        """``out_scale``: see :func:`~mmlinattn.attention.base.scaled_linear`."""
        return scaled_linear(self.fc2, self.dwconv(self.fc1(x), of_gelu=True), out_scale)


class DWConvFFN(MLP):
    """PVTv2's feed-forward network on (B, H, W, C): linear, DWConv3x3, GELU, linear. Arguments as :class:`MLP`."""

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dwconv(self.fc1(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.fc2(F.gelu(hidden))
