# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The transformer block of all hosts, and its feed-forward networks on (B, H, W, C) maps."""

import functools
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import ops
from ..ops import dispatch
from ..ops.tensors import to_image
from .linear import apply_linear, has_hooks, is_plain_linear
from .patch_embed import is_plain_conv

STRIP_NUMEL = 2**22  # of the hidden map: 16 MiB in float32


class Block(BaseModule):
    """Pre-norm transformer block with what any host may want of it.

    ``x = position(x); x = x + gamma1 * attn(norm1(x)); x = x + gamma2 * ffn(norm2(x))``, each branch under stochastic
    depth.

    Args:
        dim (int): Width C.
        attn (nn.Module): Takes and gives maps (or tokens) of width C; gets the stage's shared keyword arguments and,
            where its ``wants_input`` is true, what goes into ``norm1`` as ``context_tokens``. In inference, a branch
            whose ``adds_residual`` is true gets the ``residual`` to add to what it gives.
        ffn (nn.Module): Takes and gives maps of width C.
        norm_cfg (dict): Both norms, over the last axis.
        drop_path (float): Rate of stochastic depth.
        layer_scale (float, optional): Initial value of gamma; None for no layer scale. With it, ``attn`` and ``ffn``
            take an ``out_scale``, see :func:`~mmlinattn.layers.apply_linear`.
        position (nn.Module, optional): Position encoding that includes its own residual connection.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        ffn: nn.Module,
        norm_cfg: dict,
        drop_path: float = 0.0,
        layer_scale: Optional[float] = None,
        position: Optional[nn.Module] = None,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.position = position
        self.norm1 = build_norm_layer(norm_cfg, dim)[1]
        self.attn = attn
        self.norm2 = build_norm_layer(norm_cfg, dim)[1]
        self.ffn = ffn
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        gammas = [None if layer_scale is None else nn.Parameter(torch.full((dim,), float(layer_scale))) for _ in '12']
        self.gamma1, self.gamma2 = gammas

    def add_branch(
        self, x: Tensor, norm: nn.Module, branch: Any, gamma: Optional[Tensor], casts: bool, **shared
    ) -> Tensor:
        if gamma is not None and takes_scale(x, casts):
            shared['out_scale'], gamma = gamma, None
        drops = self.training and isinstance(self.drop_path, DropPath)
        if gamma is None and not drops and _adds_residual(branch):
            return branch(apply_norm(norm, x, casts), residual=x, **shared)
        out = branch(apply_norm(norm, x, casts), **shared)
        if gamma is None and not drops:
            return x + out
        # paths are dropped in a small tensor of scales, which saves passes over the map
        scale = x.new_ones(1) if gamma is None else gamma
        scale = self.drop_path(scale.expand(x.shape[0], *(1,) * (x.dim() - 2), len(scale)))
        return torch.addcmul(x, out, scale.to(x.dtype)) if x.dtype == out.dtype else x + out * scale

    def forward(self, x: Tensor, **shared) -> Tensor:
        if self.position is not None:
            x = self.position(x)
        casts = dispatch.autocasts(x)
        source = dict(context_tokens=x) if getattr(self.attn, 'wants_input', False) else {}
        x = self.add_branch(x, self.norm1, self.attn, self.gamma1, casts, **source, **shared)
        ffn: Any = self.ffn
        if 'grid' in shared and getattr(ffn, 'halo', None):  # tokens, and a convolution that needs their map
            ffn = functools.partial(over_tokens, ffn, grid=shared['grid'])
        return self.add_branch(x, self.norm2, ffn, self.gamma2, casts)


def _adds_residual(branch) -> bool:
    """Whether the sum with the residual is the branch's: in inference, in the pass that writes its last product. Who
    watches the branch sees its output alone."""
    return getattr(branch, 'adds_residual', False) and not dispatch.records() and not has_hooks(branch)


def takes_scale(x: Tensor, casts: bool) -> bool:
    """Whether the matrix that a map is multiplied by may be scaled: not where products are made in float16, in which
    small scales underflow. ``casts``: under autocast."""
    return (torch.get_autocast_dtype(x.device.type) if casts else x.dtype) != torch.float16


def apply_norm(norm: nn.Module, x: Tensor, casts: bool) -> Tensor:
    """``norm(x)``. In inference under autocast (``casts``) on CPUs, a LayerNorm gives the type of autocast: it sums in
    float32 all the same, and the products that follow would round its result."""
    if casts and isinstance(norm, nn.LayerNorm):
        route = dispatch.route(x)
        if route.backend == 'cpu' and not route.records and x.dtype == route.dtype:
            with dispatch.without_autocast(x):
                return norm(x)
    return norm(x)


# --- feed-forward networks --------------------------------------------------------------------------------------------


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
        self.hidden_dim = hidden_dim
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
        numel = x.numel() // x.shape[-1] * self.hidden_dim
        if dispatch.records() or numel <= 2 * STRIP_NUMEL or dispatch.backend(x) != 'cpu':
            return None
        if not is_plain_linear(self.fc2):  # hooks see whole maps
            return None
        row_numel = numel // (x.shape[0] * x.shape[1])
        return max(STRIP_NUMEL // row_numel, 8 * self.halo, 1)

    def _strips(self, x: Tensor, rows: int) -> Iterator[tuple[int, slice, slice, Tensor]]:
        """Image, rows, these rows within the part, and the part of ``x`` that they depend on, of each strip."""
        height = x.shape[1]
        for i, image in enumerate(x.split(1)):
            for top in range(0, height, rows):
                bottom = min(top + rows, height)
                first, last = max(top - self.halo, 0), min(bottom + self.halo, height)
                yield i, slice(top, bottom), slice(top - first, bottom - first), image[:, first:last]


class ResidualDWConv(nn.Conv2d):
    """``x + DWConv(x)`` on (B, H, W, C) maps: conditional position encoding, and the local term of RAVLT's FFN.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd size of the depth-wise convolution.
    """

    def __init__(self, dim: int, kernel_size: int = 3) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor, of_gelu: bool = False, is_hidden: bool = False) -> Tensor:
        """As :func:`~mmlinattn.ops.residual_depthwise_conv2d`, of (B, H, W, C)."""
        image = ops.residual_depthwise_conv2d(to_image(x), self.weight, self.bias, of_gelu, is_hidden)
        return image.permute(0, 2, 3, 1)


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
        return self.dwconv(apply_linear(self.fc1, x, gelu=True), is_hidden=True)


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
