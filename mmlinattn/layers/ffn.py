# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from .position import ResidualDWConv


class ConvFFN(BaseModule):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear.

    Args:
        dim (int): Width C.
        hidden_dim (int): Width of the hidden layer.
    """

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.dwconv = ResidualDWConv(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dwconv(F.gelu(self.fc1(x))))
