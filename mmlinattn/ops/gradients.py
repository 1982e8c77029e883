# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Analytic gradients of ops: they keep less memory than autograd, or launch fewer kernels."""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch


class AnalyticGradient(torch.autograd.Function):
    """Base class of ops with an analytic gradient, called as ``apply(options, *tensors)``.

    A subclass defines ``forward(ctx, options, *tensors)``. It sets ``ctx.op`` (the subclass) and ``ctx.options``. It
    saves ``tensors``, then the intermediate results that ``gradient`` needs. It returns neither an input nor a view of
    one.

    If the gradient is differentiated again (``create_graph=True``) or batched (``is_grads_batched=True``), autograd
    differentiates ``equation`` instead.

    Attributes:
        equation: ``(*tensors, **options)`` -> result, in operations that autograd records.
        gradient: ``(gradients of the results, tensors, other saved tensors, flags of tensors that need a gradient,
            **options)`` -> gradients of the tensors. If None, ``equation`` is recomputed and differentiated.
    """

    equation: Callable
    gradient: Optional[Callable] = None

    @staticmethod
    def backward(ctx: Any, *grads):
        op, saved, wanted = ctx.op, ctx.saved_tensors, ctx.needs_input_grad[1:]
        inputs, kept = saved[: len(wanted)], saved[len(wanted) :]
        with dispatch.without_autocast(grads[0]):  # the caller may run the backward pass inside an autocast context
            transformed = any(map(private_apis.is_batched, grads)) or dispatch.needs_reference(*grads, *inputs)
            if op.gradient is None or torch.is_grad_enabled() or transformed:
                found = _gradients_of(op.equation, inputs, wanted, grads, ctx.options)
            else:
                found = op.gradient(grads, inputs, kept, wanted, **ctx.options)
        return None, *(grad if want else None for grad, want in zip(found, wanted))


def recomputed(of_equation: Callable) -> type[AnalyticGradient]:
    """Return an :class:`AnalyticGradient` that recomputes ``of_equation`` in the backward pass instead of keeping its
    intermediate results."""

    class Recomputed(AnalyticGradient):
        equation = staticmethod(of_equation)

        @staticmethod
        def forward(ctx: Any, options: dict, *tensors):
            ctx.op, ctx.options = Recomputed, options
            ctx.save_for_backward(*tensors)
            return of_equation(*tensors, **options)

    return Recomputed


def _gradients_of(equation, inputs, wanted, grads, options) -> Sequence[Optional[Tensor]]:
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each input is a view of its own, so that two inputs that are one tensor get separate gradients.
        leaves = [
            t if not want else t.view_as(t) if twice else t.detach().requires_grad_() for t, want in zip(inputs, wanted)
        ]
        out = equation(*leaves, **options)
        asked = [t for t, want in zip(leaves, wanted) if want]
        found = iter(torch.autograd.grad(out, asked, grads, create_graph=twice, allow_unused=True))
    return [next(found) if want else None for want in wanted]
