# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Slices of one projection whose gradients become that of the projection without a copy.

Queries, keys and values are slices of one tensor. Autograd would make the gradient of each, and copy them into that of
the whole: the three largest tensors of an attention twice. Here, whoever computes the gradients asks
:func:`gradients_like` for memory in which they lie as the slices do, and :func:`split` knows it when it sees it.
"""

from typing import Optional

import torch
from torch import Tensor

from ..layers.tracing import is_traced


def split(x: Tensor, widths) -> tuple[Tensor, ...]:
    """``x.split(widths, dim=-1)`` of a contiguous ``x``."""
    learns = torch.is_grad_enabled() and x.requires_grad
    # elsewhere than on CPUs, copies cost less than Python in the backward pass
    if not learns or not x.is_contiguous() or x.device.type != 'cpu' or is_traced():
        return x.split(widths, dim=-1)
    return _Split.apply(x, *widths)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *widths):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.widths, ctx.dtype, ctx.device = x.shape, widths, x.dtype, x.device
        return x.split(widths, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        grads = [
            torch.zeros((), dtype=ctx.dtype, device=ctx.device).expand(*ctx.shape[:-1], width) if grad is None else grad
            for grad, width in zip(grads, ctx.widths)
        ]
        whole = _whole(grads, ctx.shape, ctx.widths)
        return torch.cat(grads, dim=-1) if whole is None else whole, *(None for _ in ctx.widths)


def _whole(parts: list[Tensor], shape: torch.Size, widths) -> Optional[Tensor]:
    """The contiguous tensor of ``shape`` whose slices ``parts`` are, None if there is none."""
    first = parts[0]
    left = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if left < shape.numel():
        return None
    strides = torch.empty(shape, device='meta').stride()
    whole = first.as_strided(shape, strides)
    return whole if all(_same(*pair) for pair in zip(whole.split(widths, dim=-1), parts)) else None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory; axes of one element may have any stride."""
    steps = [[stride for stride, size in zip(t.stride(), t.shape) if size > 1] for t in (a, b)]
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and steps[0] == steps[1]


def gradients_like(*tensors: Tensor) -> list[Tensor]:
    """Uninitialised gradients for tensors of one dtype and device.

    Tensors that together fill a stretch of memory get gradients that do so in the same way.
    """
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    made = {}
    for group in groups.values():
        starts = [t.storage_offset() for t in group]
        ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 for t in group]
        first, size = min(starts), max(ends) - min(starts)
        dense = all(s > 0 for t in group for s in t.stride()) and len(set(starts)) == len(group)
        if dense and size == sum(t.numel() for t in group):
            memory = group[0].new_empty(size)
            for tensor in group:
                made[id(tensor)] = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first)
        else:
            for tensor in group:
                made[id(tensor)] = torch.empty_like(tensor)
    return [made[id(tensor)] for tensor in tensors]
