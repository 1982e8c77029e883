# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from .fused import apply_linear
from .position import ResidualDWConv
from .tracing import is_traced


class MLP(BaseModule):
    """Feed-forward network on (B, H, W, C) maps or (B, N, C) tokens: linear, GELU, linear.

    In inference on CPUs, large maps pass through in strips of rows: the hidden map, several times as wide as its input,
    then stays in the cache and is never allocated whole.

    Args:
        dim (int): Width C.
        hidden_dim (int): Width of the hidden layer.
    """

    halo = 0  # rows above and below that a row of the hidden map depends on
    strip_numel = 2**21  # of the hidden map: 8 MiB in float32

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden map of ``x``."""
        return apply_linear(self.fc1, x, gelu=True)

    def forward(self, x: Tensor, out_scale: Optional[Tensor] = None) -> Tensor:
        """``out_scale``: see :func:`~mmlinattn.layers.fused.apply_linear`."""
        height, row_numel = x.shape[1], x[0, 0].numel() // x.shape[-1] * self.fc1.out_features
        whole = torch.is_grad_enabled() or x.device.type != 'cpu' or is_traced()
        if whole or x.shape[0] * height * row_numel <= 2 * self.strip_numel:
            return apply_linear(self.fc2, self.hidden(x), out_scale)
        rows = max(self.strip_numel // row_numel, 8 * self.halo, 1)
        out = None
        for i, image in enumerate(x.split(1)):
            for top in range(0, height, rows):
                bottom = min(top + rows, height)
                first, last = max(top - self.halo, 0), min(bottom + self.halo, height)
                hidden = self.hidden(image[:, first:last])[:, top - first : bottom - first]
                strip = apply_linear(self.fc2, hidden, out_scale)
                if out is None:
                    out = strip.new_empty(*x.shape[:-1], strip.shape[-1])
                out[i, top:bottom] = strip[0]
        return out


class ConvFFN(MLP):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear. Arguments as
    :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = ResidualDWConv(hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # GELU is computed again in the backward pass, with the convolution's
            return self.dwconv(apply_linear(self.fc1, x), of_gelu=True)
        return self.dwconv(apply_linear(self.fc1, x, gelu=True))


class DWConvFFN(MLP):
    """PVTv2's feed-forward network on (B, H, W, C): linear, DWConv3x3, GELU, linear. Arguments as :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.dwconv(apply_linear(self.fc1, x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
