# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused forms of attentions: queries and keys are mapped in place, what follows is added where results are written."""

import itertools
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import ops
from ..attention import (
    Attention,
    EnhancedMixer,
    FocusedMixer,
    GlobalAttention,
    Grid,
    HallucinatedMixer,
    HydraMixer,
    InLineMixer,
    RALAMixer,
    ReducedAttention,
    SoftmaxMixer,
    StripeAttention,
    WindowAttention,
)
from ..attention.angular import AngularMixer
from ..attention.arrangements import RelativePositionBias, windows_of
from ..attention.base import DepthwiseConv2d, Mixing, ReducedKeysAttention, mean_token
from ..attention.efficient import EfficientMixer
from ..attention.inline import PredictedConv
from ..attention.windows import Windows
from ..layers import PositionTable
from ..ops.convolution import dynamic_depthwise_conv2d_eager
from ..ops.focused import focused_in_place
from ..ops.grid import on_grid
from ..ops.rank_augmented import rala_in_place
from .regions import assemble, cut, regions_of
from .room import KNOWN, Room, added, form_of

KNOWN |= {
    *(AngularMixer, EfficientMixer, EnhancedMixer, FocusedMixer, HallucinatedMixer, HydraMixer, InLineMixer),
    *(RALAMixer, SoftmaxMixer, DepthwiseConv2d, Mixing, PositionTable, PredictedConv, RelativePositionBias),
}


def project(room: Room, layer: nn.Linear, x: Tensor, widths, separately: bool) -> list[Tensor]:
    """Outputs of a linear layer, one tensor each of ``widths``. ``separately``: by products of their own, but for the
    first two; a convolution would copy values that are a slice of something wider."""
    if not separately:
        return list(room.linear(layer, x).split(widths, dim=-1))
    rows = [widths[0] + widths[1], *widths[2:]]
    biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
    x = room.cast(x)
    both, *rest = (room.product(x, weight, bias) for weight, bias in zip(layer.weight.split(rows), biases))
    return [*both.split(widths[:2], dim=-1), *rest]


def convolves(self: Any) -> bool:
    """Whether values are convolved."""
    return self.local is not None or not self.mixer.quadratic


def mix(
    room: Room, self: Mixing, q, k, v, grid, key_grid=None, mask=None, rotary=None, bias=None, context=None
) -> Tensor:
    """:meth:`Mixing.mix`, which writes over ``q`` and ``k``. ``context``: of an InLine mixer its kernels."""
    mixer: Any = self.mixer
    key_grid = key_grid or grid
    kind = type(mixer)
    if kind is RALAMixer:
        out = rala_in_place(q, k, v, mixer.num_heads, mixer.kernel, rotary, mask, mixer.weight_scale)
    elif kind is InLineMixer and mixer.injective:
        out = ops.inline_attention(q, k, v, mixer.num_heads, mixer.head_dim**-0.5, mixer.kernel, mask)
        if context is not None:
            out = _add_dynamic(room, out, v, context.to(v.dtype), grid)
    elif kind is FocusedMixer and mixer.scale is not None:
        offset = None if mixer.position is None else mixer.position.on(key_grid)
        inverse_scale = 1 / torch.nn.functional.softplus(mixer.scale)
        out = focused_in_place(q, k, v, mixer.num_heads, inverse_scale, mixer.power, offset, mask)
        if mixer.local is not None:
            weight = mixer.local.weight.repeat(mixer.num_heads, 1, 1, 1)
            shared = mixer.local.bias.repeat(mixer.num_heads)
            out = _add_local(room, out, v, weight, shared, key_grid)
    else:
        terms = dict(rotary=rotary if mixer.rotary else None, bias=bias if mixer.bias else None, context=context)
        out = mixer(q, k, v, grid, key_grid, mask, **terms)
    local = self.local
    return out if local is None else _add_local(room, out, v, local.weight, local.bias, grid)


def _add_local(room: Room, out: Tensor, v: Tensor, weight: Tensor, bias: Optional[Tensor], grid: Grid) -> Tensor:
    """``out`` plus a depth-wise convolution of the values, in place where there are no class tokens."""
    if grid.prefix:
        return out + on_grid(lambda image: ops.depthwise_conv2d(image, weight, bias), v, grid)
    made = room.depthwise(_map_of(v, grid), weight, bias, _map_of(out, grid))
    return made.permute(0, 2, 3, 1).flatten(1, 2)


def _add_dynamic(room: Room, out: Tensor, v: Tensor, kernels: Tensor, grid: Grid) -> Tensor:
    """:func:`_add_local` by kernels (B, C, k, k), each image's own."""
    if len(v) == 1:
        return _add_local(room, out, v, kernels.transpose(0, 1), None, grid)
    return added(out, on_grid(lambda image: dynamic_depthwise_conv2d_eager(image, kernels), v, grid))


def _map_of(x: Tensor, grid: Grid) -> Tensor:
    """(B, h * w, C) as a (B, C, h, w) view in channels-last memory."""
    return x.unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)


def context_of(self: Any, x: Tensor, mask: Optional[Tensor] = None) -> Optional[Tensor]:
    """The argument ``context`` of :func:`mix`."""
    return prepared(self, mean_token(x, mask)) if self.mixer.context else None


def prepared(self: Any, mean: Tensor) -> Tensor:
    """The kernels that an InLine mixer predicts from mean tokens (B, C)."""
    mixer: Any = self.mixer
    predicts = isinstance(mixer, InLineMixer) and mixer.injective
    return mixer.residual.kernels(mean) if predicts else mean  # type: ignore[union-attr]


def gated(self: Any, out: Tensor, x: Tensor, projected: list) -> Tensor:
    """``out`` times its gate, in place."""
    if self.gate is None:
        return out
    gate = projected[0] if projected else x if self.gate == 'identity' else x.tanh()
    return out.mul_(gate) if out.dtype == gate.dtype else out * gate


# --- arrangements -----------------------------------------------------------------------------------------------------


@form_of(Attention, GlobalAttention)
def whole(room: Room, self: Any, x: Tensor, stage, source=None, scale=None, residual=None) -> Tensor:
    tokens = x.flatten(1, -2)
    q, k, v, *gate = project(room, self.qkv, tokens, self.widths, convolves(self))
    context = context_of(self, tokens if source is None else source.flatten(1, -2))
    out = mix(room, self, q, k, v, stage.grid, rotary=stage.rotary, context=context)
    out = gated(self, out, tokens, gate)
    return room.linear(self.proj, out.view(*x.shape[:-1], out.shape[-1]), scale, residual=residual)


@form_of(ReducedAttention)
def reduced_keys(
    room: Room, self: ReducedKeysAttention, x: Tensor, stage, source=None, scale=None, residual=None
) -> Tensor:
    reduced, tokens = self.reduce(x), x.flatten(1, 2)
    q, *gate = room.linear(self.q, tokens).split((self.widths[0], *self.widths[3:]), dim=-1)
    k, v = room.linear(self.kv, reduced.flatten(1, 2)).split(self.widths[1:3], dim=-1)
    context = context_of(self, tokens if source is None else source.flatten(1, 2))
    out = mix(room, self, q, k, v, stage.grid, Grid(*reduced.shape[1:3]), context=context)
    out = gated(self, out, tokens, gate).unflatten(1, stage.grid[:2])
    return room.linear(self.proj, out, scale, residual=residual)


@form_of(WindowAttention)
def windows(room: Room, self: WindowAttention, x: Tensor, stage, source=None, scale=None, residual=None) -> Tensor:
    made: Any = windows_of(stage, x).get(self.window, self.shift)
    windows, real, hidden = made
    if not (self.mixer.quadratic or windows.is_whole or any(windows.shift)):
        return _in_regions(room, self, x, windows, real, source, scale, residual)
    tokens, grid = windows.partition(x), windows.grid(x)
    q, k, v, *gate = project(room, self.qkv, tokens, self.widths, convolves(self))
    if real is not None:
        v = v * real.unsqueeze(-1).to(v.dtype)
    context = None
    if self.mixer.context:
        context = prepared(self, mean_token(tokens if source is None else windows.partition(source), real))
    if self.mixer.local_keys:
        grid = grid._replace(regions=windows.regions_of_tokens(x))
    out = mix(room, self, q, k, v, grid, mask=real, bias=self.map_bias(windows, hidden, x.shape[0]), context=context)
    out = room.linear(self.proj, gated(self, out, tokens, gate), scale)
    out = windows.merge(out, x.shape[0])
    return out if residual is None else residual + out


def _in_regions(
    room: Room, self: WindowAttention, x: Tensor, windows: Windows, real, source, scale, residual
) -> Tensor:
    """Windows of a linear attention are large, and padding may be most of the last ones. So those of large maps end
    where the map does, each size a group of its own; on small maps padding takes less time than the parallel regions
    of a group."""
    regions = regions_of(x, windows)
    q, k, v, *gate = project(room, self.qkv, x, self.widths, True)
    mask = real if len(regions) == 1 else None

    def mixed():
        pieces = [cut(part, regions) for part in (q, k, v)]
        means: Iterable = itertools.repeat(None)
        if self.mixer.context:
            of_windows = list(cut(x if source is None else source, regions, mean=True))
            means = prepared(self, torch.cat(of_windows)).split([len(part) for part in of_windows])
        for (_, _, part), context, *tensors in zip(regions, means, *pieces):
            (height, width), (queries, keys, values) = part.window, tensors
            grid = Grid(height, width, within=windows.window)
            yield mix(room, self, queries, keys, values, grid, mask=mask, context=context)

    out = assemble(mixed(), regions)
    return room.linear(self.proj, gated(self, out, x, gate), scale, residual=residual)


@form_of(StripeAttention)
def stripes(room: Room, self: StripeAttention, x: Tensor, stage, source=None, scale=None, residual=None) -> Tensor:
    parts = room.linear(self.qkv, x).split([2 * width for width in self.widths], dim=-1)
    parts = [part.unflatten(-1, (2, -1)) for part in parts]
    outs = []
    for i, window in enumerate(((None, self.stripe), (self.stripe, None))):
        windows, real, _ = windows_of(stage, x).get(window)
        branch: Any = self.branches[i]
        stripes = windows.partition(torch.cat([part[..., i, :] for part in parts], dim=-1))
        q, k, v, *gate = stripes.split(self.widths, dim=-1)
        context = None
        if branch.mixer.context:
            tokens = windows.partition((x if source is None else source).chunk(2, dim=-1)[i])
            context = prepared(branch, mean_token(tokens, real))
        out = mix(room, branch, q, k, v, windows.grid(x), mask=real, context=context)
        outs.append(windows.merge(out * gate[0] if gate else out, x.shape[0]))
    return room.linear(self.proj, torch.cat(outs, dim=-1), scale, residual=residual)
