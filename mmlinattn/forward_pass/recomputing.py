# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Recompute blocks in the backward pass, to save memory in training (``with_cp``)."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops import dispatch
from ..ops.batch_norms import is_batch_norm
from ..ops.casting import UseCasts
from ..ops.leaves import casts


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
    """Context of the repeated call: it uses the casts of the first call, and restores the running statistics of batch
    norms afterwards. It is a class, since several backward passes of one graph enter it again."""

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
