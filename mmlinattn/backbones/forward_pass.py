# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Context of a backbone's forward pass: checks of the input, weights cast for autocast, recomputed blocks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops import dispatch
from ..ops.batch_norms import is_batch_norm
from ..ops.casting import UseCasts, cast_together
from ..ops.leaves import Leaf, casts
from ..utils import private_apis


def prepare(backbone: Any, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
    """Check a batch of images, and return the images and the context for a forward pass of a backbone.

    Under autocast, the weights of the leaves are cast together. On a CPU without instructions for bfloat16, autocast is
    off and the images are float32.

    Args:
        backbone (Backbone): The backbone.
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
    """Return the float32 weights of the leaves of a backbone, by stage; none if blocks are compiled.

    The lists are kept until :func:`forget_weights`. A parameter that is replaced meanwhile has no cast, so its leaf
    casts it.
    """
    if backbone not in _weights:
        modules = [[part for module in stage for part in module.modules()] for stage in backbone.stage_modules()]
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


# --- recomputed blocks ------------------------------------------------------------------------------------------------


def recompute(block: nn.Module, x: Tensor, stage: Any) -> Tensor:
    """Call ``block(x, stage)`` and, if ``x`` has a gradient, repeat the call in the backward pass to save memory."""
    if not x.requires_grad:
        return block(x, stage)
    contexts: dict = {}
    if not dispatch.is_traced():  # compilers take no contexts
        found = casts.found
        contexts['context_fn'] = lambda: (nullcontext(), Repetition(found, block))
    return checkpoint(block, x, stage, use_reentrant=False, **contexts)


class Repetition(UseCasts):
    """Context of the repeated call: the casts of the first one, and batch norms that keep the running statistics that
    it has updated. It is a class, since several backward passes of one graph enter it again."""

    def __init__(self, found: dict[int, Tensor], module: nn.Module) -> None:
        super().__init__(found)
        self.module = module
        self.kept: list[tuple[nn.Module, dict]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.kept = [(m, dict(m._buffers)) for m in self.module.modules() if is_batch_norm(m) and m.training]
        for norm, kept in self.kept:
            norm._buffers.update({name: None if value is None else value.clone() for name, value in kept.items()})

    def __exit__(self, *error) -> None:
        for norm, kept in self.kept:
            norm._buffers.update(kept)
        super().__exit__(*error)
