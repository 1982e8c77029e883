# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import ops
from ..ops import dispatch
from ..ops.sizes import to_image
from .linear import apply_linear
from .plain import is_plain_conv, is_plain_linear
from .position import ResidualDWConv

STRIP_NUMEL = 2**22  # of the hidden map: 16 MiB in float32


class MLP(BaseModule):
    """Feed-forward network on (B, H, W, C) maps or (B, N, C) tokens: linear, GELU, linear.

    In inference on CPUs, large maps pass through in strips of rows: the hidden map, several times as wide as its input,
    is never allocated whole.

    Args:
        dim (int): Width C.
        hidden_dim (int): Width of the hidden layer.
    """

    halo = 0  # rows above and below that a row of the hidden map depends on
    takes_statistics = False  # over the whole map, while training: batch norms of a compact FFN
    adds_residual = True  # forward takes a ``residual``, see :class:`~mmlinattn.layers.Block`

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden map of ``x``."""
        return apply_linear(self.fc1, x, gelu=True)

    def forward(self, x: Tensor, out_scale: Optional[Tensor] = None, residual: Optional[Tensor] = None) -> Tensor:
        """``fc2(hidden(x)) * out_scale + residual``; see :func:`~mmlinattn.layers.apply_linear`."""
        rows = None if self.takes_statistics and self.training else self._rows_of_strip(x)
        if rows is None:
            return apply_linear(self.fc2, self.hidden(x), out_scale, residual=residual)
        out: Any = None
        for i, strip, inner, part in self._strips(x, rows):
            over = None if residual is None else residual[i : i + 1, strip]
            made = apply_linear(self.fc2, self.hidden(part)[:, inner], out_scale, residual=over)
            if out is None:
                out = made.new_empty(*x.shape[:-1], made.shape[-1])
            out[i, strip] = made[0]
        return out

    def _rows_of_strip(self, x: Tensor) -> Optional[int]:
        """None for the whole map at once."""
        whole = dispatch.records() or x.numel() == 0 or not is_plain_linear(self.fc2)  # hooks see whole maps
        if whole or dispatch.backend(x) != 'cpu':
            return None
        row_numel = x[0, 0].numel() // x.shape[-1] * self.fc2.in_features
        if x.shape[0] * x.shape[1] * row_numel <= 2 * STRIP_NUMEL:
            return None
        return max(STRIP_NUMEL // row_numel, 8 * self.halo, 1)

    def _strips(self, x: Tensor, rows: int) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Image, rows, these rows within the part, and the part of ``x`` that they depend on, of each strip."""
        height = x.shape[1]
        for i, image in enumerate(x.split(1)):
            for top in range(0, height, rows):
                bottom = min(top + rows, height)
                first, last = max(top - self.halo, 0), min(bottom + self.halo, height)
                yield i, slice(top, bottom), slice(top - first, bottom - first), image[:, first:last]


class ConvFFN(MLP):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear. Arguments as
    :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = ResidualDWConv(hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        if dispatch.records() and not dispatch.is_plain(x):  # GELU is computed again, with the convolution's gradients
            return self.dwconv(apply_linear(self.fc1, x), of_gelu=True)
        return self.dwconv(apply_linear(self.fc1, x, gelu=True))


class DWConvFFN(MLP):
    """PVTv2's feed-forward network on (B, H, W, C): linear, DWConv3x3, GELU, linear. Arguments as :class:`MLP`."""

    halo = 1

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

    def hidden(self, x: Tensor) -> Tensor:
        x, conv = to_image(apply_linear(self.fc1, x)), self.dwconv
        if is_plain_conv(conv):
            padding: Any = conv.padding
            x = ops.gelu_of_conv(x, conv.weight, conv.bias, 1, padding[0], conv.groups)
        else:
            x = F.gelu(conv(x))
        return x.permute(0, 2, 3, 1)


def over_tokens(ffn: MLP, x: Tensor, grid, residual: Optional[Tensor] = None, **kwargs) -> Tensor:
    """A feed-forward network of maps on tokens (B, N, C) with class tokens, each of which is a map of one pixel."""
    prefix = grid.prefix
    image = ffn(x[:, prefix:].unflatten(1, (grid.height, grid.width)), **kwargs).flatten(1, 2)
    if prefix:
        alone = ffn(x[:, :prefix].flatten(0, 1)[:, None, None], **kwargs).reshape(x.shape[0], prefix, -1)
        image = torch.cat((alone, image), dim=1)
    return image if residual is None else residual + image
