# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A backbone's forward pass: checks of the input, weights cast for autocast, recomputed blocks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..ops import dispatch
from ..ops.casting import UseCasts, cast_together
from ..ops.leaves import Leaf
from ..utils import private_apis
from .recomputing import recompute

__all__ = ['forget_weights', 'prepare', 'recompute']


def prepare(backbone: Any, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
    """Check a batch of images, and return the images and the context for a forward pass of a backbone.

    Under autocast, the weights of the leaves are cast together. On a CPU without instructions for bfloat16, autocast is
    off and the images are float32.

    Args:
        x (Tensor): (B, in_channels, H, W).

    Raises:
        ValueError: For images of another shape or type than the backbone takes.
    """
    backbone.check_input(x)
    dtype = dtype_of(backbone) or x.dtype  # replicas of DataParallel have no parameters
    autocasts = dispatch.autocasts(x) and torch.float64 not in (x.dtype, dtype)
    # autocast converts between half precision and float32, but not float64
    if not x.is_floating_point() or (x.dtype != dtype and not autocasts):
        raise ValueError(f'x has the type {x.dtype}; the model is in {dtype} and takes images of that type')
    if dispatch.is_traced():
        return x, dispatch.size_oblivious()
    if not autocasts or dispatch.needs_reference(x):
        return x, nullcontext()
    if dtype == torch.float32 and is_slow(x):
        return x.float(), dispatch.without_autocast(x)
    return x, UseCasts(cast_together(weights_of(backbone), torch.get_autocast_dtype(x.device.type)))


_weights: WeakKeyDictionary = WeakKeyDictionary()


def weights_of(backbone: Any) -> list[list[Tensor]]:
    """Return the float32 weights that autocast would cast: those of the layers of :mod:`~mmlinattn.ops.leaves`.

    The result has one list per ``cast_group`` of the backbone, and is empty if a block is compiled. It is cached until
    :func:`forget_weights`. A layer whose parameter is replaced meanwhile casts the new parameter itself.
    """
    if backbone not in _weights:
        modules = [[part for module in group for part in module.modules()] for group in backbone.cast_groups()]
        leaves: Any = [[part for part in parts if isinstance(part, Leaf)] for parts in modules]
        if any(part._compiled_call_impl is not None for parts in modules for part in parts):
            leaves = []
        weights = [dict.fromkeys(p for leaf in stage for p in leaf._parameters.values()) for stage in leaves]
        _weights[backbone] = [[p for p in group if type(p) is nn.Parameter] for group in weights]
    return [[p for p in group if p.dtype == torch.float32] for group in _weights[backbone]]


def forget_weights(backbone: Any) -> None:
    _weights.pop(backbone, None)


def is_slow(x: Tensor) -> bool:
    """Return True if autocast casts to bfloat16 on a CPU without instructions for it. A depth-wise convolution takes a
    hundred times as long there as in float32."""
    is_bfloat16 = torch.get_autocast_dtype('cpu') == torch.bfloat16
    return dispatch.on_cpu(x) and is_bfloat16 and not private_apis.has_bfloat16_units()


def dtype_of(module: nn.Module) -> Optional[torch.dtype]:
    """Return the dtype of the first weight of a module or its children, None if there is none."""
    for weight in module._parameters.values():
        if weight is not None:
            return weight.dtype
    for child in module.children():
        dtype = dtype_of(child)
        if dtype is not None:
            return dtype
    return None
