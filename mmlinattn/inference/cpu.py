# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused forms for CPUs without gradients: a table from classes to functions, and those of layers."""

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.model import ModuleList
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import Tensor, nn

from ..layers import (
    MLP,
    Block,
    ConvDownsample,
    ConvFFN,
    ConvOfGELU,
    ConvStem,
    DWConvFFN,
    FactorisedLinear,
    PatchConv2d,
    ResidualDWConv,
    SourceBlock,
    TokenBlock,
    fold_batch_norm,
)
from ..layers.compact import BranchedLinear, merges
from ..layers.patch_embed import is_batch_norm, is_foldable, norm_tokens
from ..ops import dispatch
from ..utils import private_apis
from ..utils.private_apis import is_altered

STRIP_NUMEL = 2**22  # of the hidden map of a feed-forward network: 16 MiB in float32

# class -> form(cpu, module, *args)
FORMS: dict[type, Callable] = {}
CALLS_PARTS: set[Callable] = set()  # forms that use no weights of their parts, but ask for the parts' own forms
# classes that are computed from their weights alone
KNOWN: set[type] = {
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.LayerNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    SyncBatchNorm,
    nn.SyncBatchNorm,
    nn.Identity,
    nn.ModuleList,
    nn.Sequential,
    ModuleList,
    ConvOfGELU,
    DropPath,
    PatchConv2d,
}


def form_of(*kinds: type) -> Callable:
    """Registers the fused form of classes."""

    def register(form: Callable) -> Callable:
        FORMS.update(dict.fromkeys(kinds, form))
        KNOWN.update(kinds)
        return form

    return register


def is_known(module: nn.Module) -> bool:
    """Return True for a module in eval mode that its class and weights define: no subclass, adapter or
    parametrisation."""
    if type(module) not in KNOWN or module.training:
        return False
    if is_batch_norm(module) and module.running_mean is None:
        return False  # statistics of a strip or window are others
    own, buffers = vars(module), module._buffers
    if 'weight' in own or 'bias' in own or 'weight' in buffers or 'bias' in buffers:
        return False  # weights that are no parameters may be anything
    weight, bias = module._parameters.get('weight'), module._parameters.get('bias')
    if bias is not None and not (bias.is_contiguous() and (weight is None or bias.shape == weight.shape[:1])):
        return False  # oneDNN reads it as so many numbers in a row, whatever its strides and size
    return is_ordinary(module) if isinstance(module, nn.Conv2d) else True


def is_ordinary(conv: nn.Conv2d) -> bool:
    """Return True if a convolution pads with zeros and is not dilated."""
    return conv.padding_mode == 'zeros' and not isinstance(conv.padding, str) and conv.dilation == (1, 1)


def added(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, in place of ``x`` if both are of one type."""
    return x.add_(y) if x.dtype == y.dtype else x + y


class CPUForward:
    """One forward pass on a CPU without gradients.

    Args:
        dtype (torch.dtype): The type of products; under autocast, its type.
        stream_dtype (torch.dtype): The type of the residual stream.
    """

    def __init__(self, dtype: torch.dtype, stream_dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.casts = dtype != stream_dtype
        self.onednn = dispatch.onednn_takes(dtype)

    def form(self, module: nn.Module) -> Optional[Callable]:
        """Return the fused form of a module, or None if the module, or a part with weights that the form uses, is of
        another class or altered, as by a hook."""
        form = FORMS.get(type(module))
        if form is None:
            return None
        parts = [module] if form in CALLS_PARTS else list(module.modules())
        return form if all(map(is_known, parts)) and not is_altered(*parts) else None

    def call(self, module: nn.Module, *args) -> Any:
        """``module(*args)``."""
        form = self.form(module)
        return module(*args) if form is None else form(self, module, *args)

    # --- linear layers, convolutions, norms ---------------------------------------------------------------------------

    def linear(self, layer: Any, x: Tensor, gelu: bool = False) -> Tensor:
        """``layer(x)``, fused for ``nn.Linear``, and with ``gelu`` its GELU."""
        if type(layer) is nn.Linear:
            return self.product(x, layer.weight, layer.bias, gelu)
        out = self.call(layer, x)
        return F.gelu(out) if gelu else out

    def product(self, x: Tensor, weight: Tensor, bias: Optional[Tensor], gelu: bool = False) -> Tensor:
        """``x @ weight.T + bias``, or its GELU by the pass that writes the product."""
        x, weight, bias = self.cast(x), self.cast(weight), self.cast(bias)
        if self.onednn and x.numel() and weight.is_contiguous():
            return private_apis.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
        out = F.linear(x, weight, bias)
        return F.gelu(out) if gelu else out

    def conv(self, x: Tensor, layer: Any, norm: Any = None, gelu: bool = False) -> Tensor:
        """``gelu(norm(conv(x)))`` of (B, C, H, W), a batch norm folded into the convolution."""
        weight, bias = layer.weight, layer.bias
        if norm is not None:
            weight, bias = fold_batch_norm(layer, norm)
        x, weight, bias = self.cast(x), self.cast(weight), self.cast(bias)
        if gelu and self.onednn and x.numel():
            return private_apis.CONV(
                x, weight, bias, layer.padding, layer.stride, [1, 1], layer.groups, 'gelu', [], 'none'
            )
        out = F.conv2d(x, weight, bias, layer.stride, layer.padding, 1, layer.groups)
        return F.gelu(out) if gelu else out

    def residual_conv(self, x: Tensor, layer: nn.Conv2d) -> Tensor:
        """``x + layer(x)`` of a depth-wise convolution of stride 1: one more on the central tap adds ``x`` in the same
        pass. bfloat16 would round the tap."""
        if self.dtype.itemsize < 4 or layer.groups != len(layer.weight):
            return added(self.conv(x, layer), x)
        weight = layer.weight.clone()
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += 1
        return F.conv2d(x, weight, layer.bias, 1, layer.padding, 1, layer.groups)

    def norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        """``norm(x)``. A LayerNorm gives the type of products under autocast: it sums in float32 all the same, and the
        products that follow would round its result."""
        if self.casts and type(norm) is nn.LayerNorm and x.dtype == self.dtype:
            with torch.autocast('cpu', enabled=False):
                return norm(x)
        return norm(x)

    def cast(self, x: Optional[Tensor]) -> Any:
        return None if x is None else x.to(self.dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@form_of(Block, SourceBlock, TokenBlock)
def block(cpu: CPUForward, self: Any, x: Tensor, stage) -> Tensor:
    if self.drop_path.training:  # Monte Carlo dropout
        return self(x, stage)
    stage = stage._replace(source=x) if type(self) is SourceBlock else stage
    if self.position is not None:
        x = cpu.call(self.position, x)
    x = _add_branch(cpu, self, x, self.norm1, self.attn, self.gamma1, stage)
    if type(self) is TokenBlock:
        return self.add(x, self.feed_forward(x, stage), self.gamma2)
    return _add_branch(cpu, self, x, self.norm2, self.ffn, self.gamma2)


CALLS_PARTS.add(block)


def _add_branch(
    cpu: CPUForward, self: Any, x: Tensor, norm, branch: nn.Module, gamma: Optional[Tensor], *args
) -> Tensor:
    """``x + branch(norm(x)) * gamma``, in place of a result that nobody else has."""
    form = cpu.form(branch)
    if form is None:
        return self.add(x, branch(norm_tokens(norm, x), *args), gamma)
    out = form(cpu, branch, norm_tokens(functools.partial(cpu.norm, norm), x), *args)
    if gamma is None:
        return added(out, x)
    return torch.addcmul(x, out, gamma, out=out) if out.dtype == x.dtype == gamma.dtype else self.add(x, out, gamma)


# --- feed-forward networks --------------------------------------------------------------------------------------------


@form_of(MLP)
def mlp(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    def hidden(part):
        return cpu.linear(self.fc1, part, gelu=True)

    return _in_strips(cpu, self, x, hidden, 0)


@form_of(ConvFFN)
def conv_ffn(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    if type(self.dwconv) is not ResidualDWConv or not self.dwconv.of_gelu:
        return self(x)

    def hidden(part):
        part = cpu.linear(self.fc1, part, gelu=True).permute(0, 3, 1, 2)
        return cpu.residual_conv(part, self.dwconv).permute(0, 2, 3, 1)

    return _in_strips(cpu, self, x, hidden, self.dwconv.kernel_size[0] // 2)


@form_of(DWConvFFN)
def dwconv_ffn(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    if type(self.dwconv) is not nn.Conv2d or self.dwconv.stride != (1, 1):
        return self(x)

    def hidden(part):
        return cpu.conv(cpu.linear(self.fc1, part).permute(0, 3, 1, 2), self.dwconv, gelu=True).permute(0, 2, 3, 1)

    return _in_strips(cpu, self, x, hidden, self.dwconv.kernel_size[0] // 2)


def _in_strips(cpu: CPUForward, self: Any, x: Tensor, hidden: Callable, halo: int) -> Tensor:
    """``fc2(hidden(x))``, large maps in strips of rows: the hidden map, several times as wide as its
    input, is never allocated whole. ``halo``: rows above and below that a row of the hidden map depends on."""
    numel = x.numel() // x.shape[-1] * self.hidden_dim
    if numel <= 2 * STRIP_NUMEL:
        return cpu.linear(self.fc2, hidden(x))
    height = x.shape[1]
    out: Any = None
    rows = max(STRIP_NUMEL // (numel // (x.shape[0] * height)), 8 * halo, 1)
    for i in range(x.shape[0]):
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            first, last = max(top - halo, 0), min(bottom + halo, height)
            made = hidden(x[i : i + 1, first:last])[:, top - first : bottom - first]
            made = cpu.linear(self.fc2, made)
            if out is None:
                out = made.new_empty(*x.shape[:-1], made.shape[-1])
            out[i, top:bottom] = made[0]
    return out


@form_of(BranchedLinear)
def branched_linear(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    """Batch norms that are fixed make the branches one matrix."""
    if not all(map(merges, self.linears, self.norms)):
        return self(x)
    return cpu.product(x, *self.merged_weights())


@form_of(FactorisedLinear)
def factorised_linear(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    x = cpu.linear(self.down, x)
    if type(self.up) is nn.Linear and self.up.bias is not None:
        return cpu.product(x, self.up.weight, self.up.bias + self.bias)
    return cpu.call(self.up, x) + self.bias


# --- convolutions -----------------------------------------------------------------------------------------------------


@form_of(ResidualDWConv)
def residual_dwconv(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    image = (F.gelu(x) if self.of_gelu else x).permute(0, 3, 1, 2)
    return cpu.residual_conv(image, self).permute(0, 2, 3, 1)


@form_of(ConvStem, ConvDownsample)
def conv_norms(cpu: CPUForward, self: Any, x: Tensor) -> Tensor:
    """Batch norms are folded into the convolutions before them, GELU is part of the pass that writes their results."""
    layers, is_gelu = list(self.layers), False
    x = x.permute(0, 3, 1, 2)
    while layers:
        layer = layers.pop(0)
        if type(layer) not in (nn.Conv2d, ConvOfGELU):
            x = layer(x)
            continue
        if type(layer) is ConvOfGELU and not is_gelu:
            x = F.gelu(x)
        norm = layers.pop(0) if layers and is_foldable(layers[0]) else None
        is_gelu = bool(layers) and type(layers[0]) is ConvOfGELU
        x = cpu.conv(x, layer, norm, is_gelu)
    return x.permute(0, 2, 3, 1)
