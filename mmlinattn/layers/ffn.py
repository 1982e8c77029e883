# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import ops
from ..ops.sizes import to_image
from .position import ResidualDWConv


class MLP(BaseModule):
    """Feed-forward network on (B, H, W, C) maps or (B, N, C) tokens: linear, GELU, linear.

    Args:
        dim (int): Width C.
        hidden_dim (int): Width of the hidden layer.
    """

    halo = 0  # rows above and below that a row of the hidden map depends on
    takes_statistics = False  # over the whole map, while training: batch norms of a compact FFN

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden map of ``x``."""
        return ops.apply_linear(self.fc1, x, gelu=True)

    def forward(self, x: Tensor, out_scale: Optional[Tensor] = None) -> Tensor:
        """``out_scale``: see :func:`~mmlinattn.ops.apply_linear`."""
        if self.takes_statistics and self.training:
            return ops.apply_linear(self.fc2, self.hidden(x), out_scale)
        return ops.feed_forward(x, self.hidden, self.fc2, out_scale, self.halo)


class ConvFFN(MLP):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear. Arguments as
    :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = ResidualDWConv(hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        return ops.hidden_conv(x, self.fc1, self.dwconv)


class DWConvFFN(MLP):
    """PVTv2's feed-forward network on (B, H, W, C): linear, DWConv3x3, GELU, linear. Arguments as :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        return ops.gelu_of_conv(to_image(ops.apply_linear(self.fc1, x)), self.dwconv).permute(0, 2, 3, 1)


def over_tokens(ffn: MLP, x: Tensor, grid, **kwargs) -> Tensor:
    """A feed-forward network of maps on tokens (B, N, C) with class tokens, each of which is a map of one pixel."""
    prefix = grid.prefix
    image = ffn(x[:, prefix:].unflatten(1, (grid.height, grid.width)), **kwargs).flatten(1, 2)
    if not prefix:
        return image
    alone = ffn(x[:, :prefix].flatten(0, 1)[:, None, None], **kwargs).reshape(x.shape[0], prefix, -1)
    return torch.cat((alone, image), dim=1)
