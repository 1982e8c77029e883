# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A backbone's forward pass: checks of the input, weights cast for autocast, recomputed blocks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .ops import dispatch
from .ops.batch_norms import is_batch_norm
from .ops.leaves import Leaf, casts
from .utils import private_apis


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


def is_slow(x: Tensor) -> bool:
    """Return True if ``x`` is on a CPU without bfloat16 instructions, and bfloat16 is autocast's dtype for CPUs.

    Autocast need not be active. A depth-wise convolution takes a hundred times as long there as in float32.
    """
    is_bfloat16 = torch.get_autocast_dtype('cpu') == torch.bfloat16
    return dispatch.on_cpu(x) and is_bfloat16 and not private_apis.has_bfloat16_units()


def dtype_of(module: nn.Module) -> Optional[torch.dtype]:
    """Return the dtype of the first parameter of a module or its descendants, None without parameters."""
    for weight in module._parameters.values():
        if weight is not None:
            return weight.dtype
    for child in module.children():
        dtype = dtype_of(child)
        if dtype is not None:
            return dtype
    return None


# --- weights cast together --------------------------------------------------------------------------------------------

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


class CastTogether(torch.autograd.Function):
    """Cast a list of tensors by one operation, and their gradients by one operation in the backward pass.

    Autocast launches a kernel for each, and with two images a GPU waits for these launches.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        outs = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        private_apis.FOREACH_COPY(outs, tensors)
        ctx.tensors = tensors
        ctx.mark_non_differentiable(*[out for out, tensor in zip(outs, tensors) if not tensor.requires_grad])
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        if torch.is_grad_enabled():  # create_graph=True: the casts have to be differentiable
            found = [None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, ctx.tensors)]
            return None, *found
        outs = [None if grad is None else torch.empty_like(t) for grad, t in zip(grads, ctx.tensors)]
        pairs = [(out, grad) for out, grad in zip(outs, grads) if out is not None]
        if pairs:
            private_apis.FOREACH_COPY(*map(list, zip(*pairs)))
        return None, *outs


def cast_together(groups: Iterable[list[Tensor]], dtype: torch.dtype) -> dict[int, Tensor]:
    """Cast weights by one operation for each group, and return the casts by the ``id`` of the weight.

    Args:
        groups (Iterable[list[Tensor]]): float32 weights. The gradients of a group are cast when all are known, so a
            group for each stage does not delay the all-reduce of the others.
        dtype (torch.dtype): Type of autocast.
    """
    found: dict[int, Tensor] = {}
    for weights in groups:
        if weights:
            found.update(zip(map(id, weights), CastTogether.apply(dtype, *weights)))
    return found


class UseCasts:
    """Context in which the layers of :mod:`~mmlinattn.ops.leaves` share the casts of :func:`cast_together`.

    Args:
        found (dict[int, Tensor]): Cast of each weight in autocast's dtype, by ``id(weight)``. A layer without an entry
            casts the weight itself. The caller has to keep the weights alive.
    """

    def __init__(self, found: dict[int, Tensor]) -> None:
        self.found = found
        self.before: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        self.before, casts.found = casts.found, self.found

    def __exit__(self, *error) -> None:
        casts.found = self.before


# --- recomputed blocks ------------------------------------------------------------------------------------------------


def recompute(block: nn.Module, x: Tensor, stage: Any) -> Tensor:
    """Call ``block(x, stage)``, with activation checkpointing if ``x`` requires a gradient."""
    if not x.requires_grad:
        return block(x, stage)
    contexts: dict = {}
    if not dispatch.is_traced():  # compilers take no contexts
        found = casts.found
        contexts['context_fn'] = lambda: (nullcontext(), Repetition(found, block))
    return checkpoint(block, x, stage, use_reentrant=False, **contexts)


class Repetition(UseCasts):
    """Context of the call that recomputes a block in the backward pass.

    It uses the casts of the first call, and restores the running statistics of batch norms afterwards. It is a class,
    since several backward passes of one graph enter it again.
    """

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
