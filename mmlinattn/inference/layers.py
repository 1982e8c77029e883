# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused forms of blocks, feed-forward networks and convolutions with norms."""

from typing import Any, Callable, Optional

import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn

from ..layers import (
    MLP,
    Block,
    ConvDownsample,
    ConvFFN,
    ConvStem,
    DWConvFFN,
    FactorisedLinear,
    ResidualDWConv,
    SourceBlock,
    TokenBlock,
)
from ..layers.compact import BranchedLinear
from ..layers.patch_embed import is_foldable
from .room import CALLS_PARTS, KNOWN, Room, form_of

STRIP_NUMEL = 2**22  # of the hidden map: 16 MiB in float32

KNOWN |= {nn.Identity, DropPath}


@form_of(Block, SourceBlock, TokenBlock)
def block(room: Room, self: Any, x: Tensor, stage) -> Tensor:
    """Residual and layer scale are part of the product that ends a branch."""
    if self.position is not None:
        x = room.call(self.position, x)
    source = (x,) if type(self) is SourceBlock else ()
    x = _add_branch(room, x, self.norm1, self.attn, self.gamma1, stage, *source)
    if type(self) is TokenBlock:
        return self.add(x, self.feed_forward(x, stage), self.gamma2)
    return _add_branch(room, x, self.norm2, self.ffn, self.gamma2)


CALLS_PARTS.add(block)


def _add_branch(room: Room, x: Tensor, norm: nn.Module, branch: nn.Module, gamma: Optional[Tensor], *args) -> Tensor:
    form = room.form(branch)
    if form is None:
        out = branch(norm(x), *args)
        return x + (out if gamma is None else out * gamma)
    return form(room, branch, room.norm(norm, x), *args, scale=gamma, residual=x)


# --- feed-forward networks --------------------------------------------------------------------------------------------


@form_of(MLP)
def mlp(room: Room, self: Any, x: Tensor, scale: Optional[Tensor] = None, residual: Optional[Tensor] = None) -> Tensor:
    def hidden(part):
        return room.linear(self.fc1, part, gelu=True)

    return _in_strips(room, self, x, hidden, 0, scale, residual)


@form_of(ConvFFN)
def conv_ffn(room, self, x, scale=None, residual=None) -> Tensor:
    def hidden(part):
        part = room.linear(self.fc1, part, gelu=True).permute(0, 3, 1, 2)
        return room.plus_depthwise(part, self.dwconv).permute(0, 2, 3, 1)

    return _in_strips(room, self, x, hidden, 1, scale, residual)


@form_of(DWConvFFN)
def dwconv_ffn(room, self, x, scale=None, residual=None) -> Tensor:
    def hidden(part):
        return room.conv(room.linear(self.fc1, part).permute(0, 3, 1, 2), self.dwconv, gelu=True).permute(0, 2, 3, 1)

    return _in_strips(room, self, x, hidden, 1, scale, residual)


def _in_strips(
    room: Room, self: Any, x: Tensor, hidden: Callable, halo: int, scale: Optional[Tensor], residual: Optional[Tensor]
) -> Tensor:
    """``fc2(hidden(x)) * scale + residual``, large maps in strips of rows: the hidden map, several times as wide as its
    input, is never allocated whole. ``halo``: rows above and below that a row of the hidden map depends on."""
    numel = x.numel() // x.shape[-1] * self.hidden_dim
    if numel <= 2 * STRIP_NUMEL:
        return room.linear(self.fc2, hidden(x), scale, residual=residual)
    height = x.shape[1]
    out: Any = None
    rows = max(STRIP_NUMEL // (numel // (x.shape[0] * height)), 8 * halo, 1)
    for i in range(x.shape[0]):
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            first, last = max(top - halo, 0), min(bottom + halo, height)
            over = None if residual is None else residual[i : i + 1, top:bottom]
            made = hidden(x[i : i + 1, first:last])[:, top - first : bottom - first]
            made = room.linear(self.fc2, made, scale, residual=over)
            if out is None:
                out = made.new_empty(*x.shape[:-1], made.shape[-1])
            out[i, top:bottom] = made[0]
    return out


@form_of(BranchedLinear)
def branched_linear(room: Room, self: Any, x: Tensor) -> Tensor:
    """Batch norms that are fixed make the branches one matrix."""
    if not all(map(is_foldable, self.norms)):
        return self(x)
    return room.product(x, *self.merged_weights())


@form_of(FactorisedLinear)
def factorised_linear(room: Room, self: Any, x: Tensor) -> Tensor:
    x = room.linear(self.down, x)
    if type(self.up) is nn.Linear:
        return room.product(x, self.up.weight, self.up.bias + self.bias)
    return room.call(self.up, x) + self.bias


# --- convolutions -----------------------------------------------------------------------------------------------------


@form_of(ResidualDWConv)
def residual_dwconv(room: Room, self: Any, x: Tensor) -> Tensor:
    x = F.gelu(x) if self.of_gelu else x
    return room.plus_depthwise(x.permute(0, 3, 1, 2), self).permute(0, 2, 3, 1)


@form_of(ConvStem, ConvDownsample)
def conv_norms(room: Room, self: Any, x: Tensor) -> Tensor:
    """Batch norms are folded into the convolutions before them, GELU is part of the pass that writes their results."""
    layers = list(self.layers)
    x = x.permute(0, 3, 1, 2)
    while layers:
        conv = layers.pop(0)
        norm = layers.pop(0) if layers and not isinstance(layers[0], nn.Conv2d) else None
        if norm is None or is_foldable(norm):
            x = room.conv(x, conv, norm, gelu=bool(layers))
        else:
            x = norm(room.conv(x, conv))
            x = F.gelu(x) if layers else x
    return x.permute(0, 2, 3, 1)
