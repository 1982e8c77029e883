# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recompute blocks in the backward pass, to save memory in training (``with_cp``)."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers import is_batch_norm
from ..ops import dispatch


def call_recomputed(module: nn.Module, x: Tensor, *stage) -> Tensor:
    """Call ``module(x, *stage)``. Blocks, the modules called with a stage's context, are recomputed from ``x`` in the
    backward pass."""
    if not stage or not x.requires_grad:
        return module(x, *stage)
    return recompute(module, module, x, *stage)


def recompute(module: nn.Module, function: Callable, *args) -> Tensor:
    """Call ``function(*args)``, a forward pass of ``module``, and repeat it in the backward pass to save memory."""
    contexts: dict = {}
    if not dispatch.is_traced():  # compilers take no contexts
        contexts['context_fn'] = lambda: (nullcontext(), PreserveStatistics(module))
    return checkpoint(function, *args, use_reentrant=False, **contexts)


class PreserveStatistics:
    """Context for the repeated forward pass: batch norms keep the running statistics that the first pass has updated.
    It is a class, since several backward passes of one graph enter it again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: list[tuple[nn.Module, dict]] = []

    def __enter__(self) -> None:
        self.kept = [(m, dict(m._buffers)) for m in self.module.modules() if is_batch_norm(m) and m.training]
        for norm, kept in self.kept:
            norm._buffers.update({name: None if value is None else value.clone() for name, value in kept.items()})

    def __exit__(self, *error) -> None:
        for norm, kept in self.kept:
            norm._buffers.update(kept)
