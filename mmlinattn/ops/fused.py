# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused chains of layers for CPUs without gradients.

A fused chain merges GELU into the linear layer or convolution before it, and batch norms into convolutions. Large maps
are processed in strips of rows. The hidden map of a feed-forward network, several times as large as its input, is then
never allocated whole. A layer with a hook, an adapter, a parametrisation or another class is called itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..utils import private_apis
from ..utils.private_apis import is_altered
from . import dispatch
from .batch_norms import fold_batch_norm, is_foldable
from .leaves import (
    Conv2d,
    ConvOfGELU,
    Linear,
    ResidualDWConv,
    Step,
    cast_for_matmul,
    linear,
    matmul_dtype,
    residual_conv,
    takes_onednn,
)
from .tokens import from_image, to_image

STRIP_NUMEL = 2**22  # elements of a strip of the hidden feature map: 16 MiB in float32
_CALL = nn.Module.__call__, nn.Module._call_impl
_TORCH_FORWARDS = nn.Linear.forward, nn.Conv2d.forward, nn.Conv2d._conv_forward
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (Linear, Conv2d, ConvOfGELU, ResidualDWConv)}
_BY_ROW = F.gelu, F.relu, to_image, from_image


def may_fuse(x: Tensor) -> bool:
    """Return True on a CPU with gradients disabled, except in float16 or if module calls are recorded or replaced."""
    if not dispatch.writes_in_place(x) or matmul_dtype(x) == torch.float16 or private_apis.has_function_modes():
        return False
    if (nn.Linear.forward, nn.Conv2d.forward, nn.Conv2d._conv_forward) != _TORCH_FORWARDS:
        return False  # replaced by a tool that counts or quantises
    return not private_apis.has_global_hooks() and (nn.Module.__call__, nn.Module._call_impl) == _CALL


class FusedStep(NamedTuple):
    """Layer or function of a chain, fused with the batch norm or GELU after it.

    Attributes:
        step (Callable): Layer or function.
        plain (bool): True for an unaltered leaf. Its weights are read; other steps are called.
        norm (nn.Module, optional): Batch norm after the layer.
        gelu (bool): GELU after the layer.
    """

    step: Any
    plain: bool = False
    norm: Any = None
    gelu: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer or function of ``x``, then norm and GELU. Feature maps are (B, H, W, C) for linear layers
        and :class:`ResidualDWConv`, and (B, C, H, W) for other convolutions."""
        layer = self.step
        if not self.plain:
            return layer(x)
        if type(layer) is Linear:
            return linear(x, layer.weight, layer.bias, self.gelu)
        settings = layer.stride, layer.padding, layer.dilation, layer.groups
        if type(layer) is ResidualDWConv:
            return from_image(residual_conv(to_image(x), layer.weight, layer.bias, *settings))
        weight, bias = (layer.weight, layer.bias) if self.norm is None else fold_batch_norm(layer, self.norm)
        if self.gelu and takes_onednn(x, weight, bias):
            x, weight, bias = cast_for_matmul(x, weight, bias)
            stride, padding, dilation, groups = settings
            return private_apis.CONV(x, weight, bias, padding, stride, dilation, groups, 'gelu', [], 'none')
        out = F.conv2d(x, weight, bias, *settings)
        return F.gelu(out) if self.gelu else out


def is_plain(layer: Any) -> bool:
    """Return True for a linear layer or convolution without hooks, adapters, parametrisations or overridden methods.

    A convolution also needs zero padding by numbers, not ``'same'`` or ``'valid'``.
    """
    kind = type(layer)
    if kind not in _FORWARDS or (kind.__call__, kind._call_impl) != _CALL or kind.forward is not _FORWARDS[kind]:
        return False
    if not {'weight', 'bias'} <= layer._parameters.keys() or is_altered(layer):
        return False
    return kind is Linear or (layer.padding_mode == 'zeros' and not isinstance(layer.padding, str))


def plan(steps: Sequence[Step]) -> list[FusedStep]:
    """Group the layers and functions of a chain to fused steps, in order. A GELU joins the linear layer or convolution
    before it, a batch norm the convolution before it. Each other layer or function is a step of its own."""
    flat: list[FusedStep] = []
    for step in steps:
        plain = is_plain(step)
        if plain and (type(step) is ConvOfGELU or (type(step) is ResidualDWConv and step.of_gelu)):
            flat.append(FusedStep(F.gelu))  # GELU of the input may belong to the layer before
        flat.append(FusedStep(step, plain))
    fused: list[FusedStep] = []
    for each in flat:
        last = fused[-1] if fused else each
        extends = last.plain and not last.gelu and type(last.step) is not ResidualDWConv
        if extends and each.step is F.gelu:
            fused[-1] = last._replace(gelu=True)
        elif extends and last.norm is None and type(last.step) is not Linear and _folds(each.step):
            fused[-1] = last._replace(norm=each.step)
        else:
            fused.append(each)
    return fused


def _folds(step: Any) -> bool:
    """Return True for a batch norm in eval mode that can be folded into the convolution before it."""
    return isinstance(step, nn.Module) and is_foldable(step) and not step.training


def chain(x: Tensor, steps: Sequence[Step]) -> Tensor:
    """Call layers and functions in sequence, with neighbours fused to one kernel where possible, see :func:`plan`."""
    fused = plan(steps)
    if not _fits_strips(x, fused):
        return _run(x, fused)
    out: Any = None
    height, width = x.shape[1:3]
    halo = sum(each.step.kernel_size[0] // 2 for each in fused if isinstance(each.step, nn.Conv2d))
    rows = max(STRIP_NUMEL // (width * fused[0].step.out_features), 8 * halo, 1)
    for i in range(x.shape[0]):
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            first, last = max(top - halo, 0), min(bottom + halo, height)
            hidden = _run(x[i : i + 1, first:last], fused[:-1])
            strip = fused[-1](hidden[:, top - first : bottom - first])
            out = strip.new_empty(*x.shape[:-1], strip.shape[-1]) if out is None else out
            out[i, top:bottom] = strip[0]
    return out


def _run(x: Tensor, fused: Sequence[FusedStep]) -> Tensor:
    for step in fused:
        x = step(x)
    return x


def _fits_strips(x: Tensor, fused: Sequence[FusedStep]) -> bool:
    """Return True for a large hidden feature map between two linear layers, whose rows depend on few rows of ``x``."""
    first, last = fused[0], fused[-1]
    if x.dim() != 4 or not (first.plain and last.plain and type(first.step) is type(last.step) is Linear):
        return False
    if x.numel() // x.shape[-1] * first.step.out_features <= 2 * STRIP_NUMEL:
        return False
    return all(each.step in _BY_ROW if not each.plain else _keeps_rows(each.step) for each in fused)


def _keeps_rows(layer: nn.Module) -> bool:
    """Return True for a linear layer, and for a convolution that keeps the size of its feature map."""
    if not isinstance(layer, nn.Conv2d):
        return True
    (rows, columns), one = layer.kernel_size, (1, 1)
    return (layer.stride, layer.dilation, layer.padding) == (one, one, (rows // 2, columns // 2)) and rows % 2 == 1
