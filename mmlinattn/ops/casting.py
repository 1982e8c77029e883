# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Casts of many weights by one operation, for autocast.

Autocast casts each weight and each gradient by its own kernel, and a GPU waits for these launches if it has only two
images.
"""

from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor

from ..utils import private_apis
from .leaves import casts


class CastTogether(torch.autograd.Function):
    """Cast a list of tensors by one operation, and their gradients by one operation in the backward pass."""

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
    """Context in which leaves look up the casts of their weights in ``found``, a dict from ``id(weight)`` to the cast.
    Leaves without an entry cast the weight themselves. The caller has to keep the weights alive."""

    def __init__(self, found: dict[int, Tensor]) -> None:
        self.found = found
        self.before: dict[int, Tensor] = {}

    def __enter__(self) -> None:
        self.before, casts.found = casts.found, self.found

    def __exit__(self, *error) -> None:
        casts.found = self.before
