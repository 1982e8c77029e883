# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused forms of attentions: convolution and gate are applied in place to the mixer's result."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import (
    Attention,
    EnhancedMixer,
    FocusedMixer,
    GlobalAttention,
    Grid,
    HallucinatedMixer,
    HydraMixer,
    InLineMixer,
    LocalMixer,
    RALAMixer,
    ReducedAttention,
    SoftmaxMixer,
    StripeAttention,
    WindowAttention,
)
from ..attention.angular import AngularMixer
from ..attention.arrangements import RelativePositionBias, windows_of
from ..attention.base import Mixing, ReducedKeysAttention, mean_token, source_tokens
from ..attention.efficient import EfficientMixer
from ..attention.inline import GroupedLinear, PredictedConv
from ..attention.mixer import RepeatedConv2d
from ..layers import PositionTable
from ..ops.grid import on_grid
from ..ops.rank_augmented import rala_in_place
from .cpu import KNOWN, CPUForward, added, form_of
from .regions import assemble, cut, regions_of

KNOWN |= {
    *(AngularMixer, EfficientMixer, EnhancedMixer, FocusedMixer, HallucinatedMixer, HydraMixer, InLineMixer),
    *(RALAMixer, SoftmaxMixer, Mixing, PositionTable, RelativePositionBias),
    *(GroupedLinear, PredictedConv, RepeatedConv2d),
}


def project(cpu: CPUForward, layer: nn.Linear, x: Tensor, widths, separately: bool) -> list[Tensor]:
    """Outputs of a linear layer, one tensor each of ``widths``. ``separately``: by products of their own, but for the
    first two; a convolution would copy values that are a slice of something wider."""
    if not separately or type(layer) is not nn.Linear:
        return list(cpu.linear(layer, x).split(widths, dim=-1))
    rows = [widths[0] + widths[1], *widths[2:]]
    biases = [None] * len(rows) if layer.bias is None else layer.bias.split(rows)
    x = cpu.cast(x)
    both, *rest = (cpu.product(x, weight, bias) for weight, bias in zip(layer.weight.split(rows), biases))
    return [*both.split(widths[:2], dim=-1), *rest]


def mix(
    cpu: CPUForward, self: Mixing, q, k, v, grid: Grid, key_grid=None, mask=None, rotary=None, bias=None, context=None
) -> Tensor:
    """:meth:`Mixing.mix`, convolutions of the values added in place."""
    mixer, key_grid, local = self.mixer, key_grid or grid, None
    rotary, bias = rotary if mixer.rotary else None, bias if mixer.bias else None
    if isinstance(mixer, RALAMixer):
        out = rala_in_place(q, k, v, mixer.num_heads, mixer.kernel, rotary, mask, mixer.weight_scale)
    elif isinstance(mixer, LocalMixer):
        out, local = mixer.attend(q, k, v, key_grid, mask), mixer.convolve(v, key_grid, context)
    else:
        out = mixer(q, k, v, grid, key_grid, mask, rotary=rotary, bias=bias, context=context)
    out = out if local is None else added(out, local)
    if self.local is None:
        return out
    if grid.prefix or type(self.local) is not nn.Conv2d:
        return added(out, on_grid(self.local, v, grid))
    image = v.unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)
    return added(out, cpu.conv(image, self.local).permute(0, 2, 3, 1).flatten(1, 2))


def gated(self: Any, out: Tensor, x: Tensor, projected: list) -> Tensor:
    """``out`` times its gate, in place."""
    if self.gate is None:
        return out
    gate = projected[0] if projected else x if self.gate == 'identity' else x.tanh()
    return out.mul_(gate) if out.dtype == gate.dtype else out * gate


# --- arrangements -----------------------------------------------------------------------------------------------------


@form_of(Attention, GlobalAttention)
def whole(cpu: CPUForward, self: Any, x: Tensor, stage) -> Tensor:
    tokens = x.flatten(1, -2)
    convolves = self.local is not None or isinstance(self.mixer, LocalMixer)
    q, k, v, *gate = project(cpu, self.qkv, tokens, self.widths, convolves)
    context = mean_token(source_tokens(tokens, stage)) if self.mixer.context else None
    out = mix(cpu, self, q, k, v, stage.grid, rotary=stage.rotary, context=context)
    out = gated(self, out, tokens, gate)
    return cpu.linear(self.proj, out.view(*x.shape[:-1], out.shape[-1]))


@form_of(ReducedAttention)
def reduced_keys(cpu: CPUForward, self: ReducedKeysAttention, x: Tensor, stage) -> Tensor:
    reduced, tokens = self.reduce(x), x.flatten(1, 2)
    q, *gate = cpu.linear(self.q, tokens).split((self.widths[0], *self.widths[3:]), dim=-1)
    k, v = cpu.linear(self.kv, reduced.flatten(1, 2)).split(self.widths[1:3], dim=-1)
    context = mean_token(source_tokens(tokens, stage)) if self.mixer.context else None
    out = mix(cpu, self, q, k, v, stage.grid, Grid(*reduced.shape[1:3]), context=context)
    out = gated(self, out, tokens, gate).unflatten(1, stage.grid[:2])
    return cpu.linear(self.proj, out)


@form_of(WindowAttention)
def windows(cpu: CPUForward, self: WindowAttention, x: Tensor, stage) -> Tensor:
    """Windows of a linear attention are large, and padding may be most of the last ones: see :mod:`.regions`."""
    made: Any = windows_of(stage, x).get(self.window, self.shift)
    windows, real, hidden = made
    # one pass over adjacent slices; values for a convolution get memory of their own
    convolves = self.local is not None or isinstance(self.mixer, LocalMixer)
    groups = [self.widths[:2], self.widths[2:3]] if convolves else [self.widths[:3]]
    projected = list(cpu.linear(self.qkv, x).split([*map(sum, groups), *self.widths[3:]], dim=-1))
    parts, gate = projected[: len(groups)], projected[len(groups) :]

    def apart(cuts) -> Any:
        return (t for part, widths in zip(cuts, groups) for t in part.split(widths, dim=-1))

    regions = [] if self.mixer.quadratic or any(windows.shift) else regions_of(x, windows)
    source = x if stage.source is None else stage.source
    if regions:
        means = cut(source, regions, mean=True) if self.mixer.context else itertools.repeat(None)
        grids = (Grid(*part.window, within=windows.window) for _, _, part in regions)

        def mixed(cuts, grid, mean) -> Tensor:
            q, k, v = apart(cuts)
            return mix(cpu, self, q, k, v, grid, context=mean)

        out = assemble(map(mixed, zip(*(cut(part, regions) for part in parts)), grids, means), regions)
    else:
        grid = windows.grid(x)
        if self.mixer.local_keys:
            grid = grid._replace(regions=windows.regions_of_tokens(x))
        context = mean_token(windows.partition(source), real) if self.mixer.context else None
        q, k, v = apart(map(windows.partition, parts))
        bias = self.map_bias(windows, hidden, x.shape[0])
        out = windows.merge(mix(cpu, self, q, k, v, grid, mask=real, bias=bias, context=context), x.shape[0])
    return cpu.linear(self.proj, gated(self, out, x, gate))


@form_of(StripeAttention)
def stripes(cpu: CPUForward, self: StripeAttention, x: Tensor, stage) -> Tensor:
    parts = cpu.linear(self.qkv, x).split([2 * width for width in self.widths], dim=-1)
    parts = [part.unflatten(-1, (2, -1)) for part in parts]
    outs = []
    for i, window in enumerate(((None, self.stripe), (self.stripe, None))):
        windows, real, _ = windows_of(stage, x).get(window)
        branch: Any = self.branches[i]
        stripes = windows.partition(torch.cat([part[..., i, :] for part in parts], dim=-1))
        q, k, v, *gate = stripes.split(self.widths, dim=-1)
        context = None
        if branch.mixer.context:
            tokens = windows.partition((x if stage.source is None else stage.source).chunk(2, dim=-1)[i])
            context = mean_token(tokens, real)
        out = mix(cpu, branch, q, k, v, windows.grid(x), mask=real, context=context)
        outs.append(windows.merge(out * gate[0] if gate else out, x.shape[0]))
    return cpu.linear(self.proj, torch.cat(outs, dim=-1))
