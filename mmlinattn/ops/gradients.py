# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Gradients written by hand: they keep less memory than autograd."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..utils import private_apis
from . import dispatch


class GradientRule(NamedTuple):
    """Equation, forward and backward pass of an op; ``options`` are the non-tensors.

    Attributes:
        equation: ``(*tensors, **options)`` -> result, in operations that autograd records.
        forward: The same -> result, and the tensors that ``backward`` needs besides the inputs.
        backward: ``(gradients of the results, inputs, kept tensors, flags of inputs that need one, **options)`` ->
            gradients of the inputs.
    """

    equation: Callable
    forward: Callable
    backward: Optional[Callable]


def recomputed(equation: Callable) -> GradientRule:
    """A rule that recomputes the equation in the backward pass instead of keeping its intermediate results."""
    return GradientRule(equation, lambda *tensors, **options: (equation(*tensors, **options), ()), None)


class _RuleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: GradientRule, options: dict, *tensors):
        out, kept = rule.forward(*tensors, **options)
        ctx.rule, ctx.options, ctx.num_inputs = rule, options, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads):
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[2:]
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        with dispatch.without_autocast(grads[0]):  # on if the backward pass runs inside of it
            transformed = any(private_apis.is_batched(grad) for grad in grads) or dispatch.needs_reference(
                *grads, *inputs
            )
            if ctx.rule.backward is None or torch.is_grad_enabled() or transformed:
                found = _gradients_of(ctx.rule.equation, inputs, wanted, grads, ctx.options)
            else:
                found = ctx.rule.backward(grads, inputs, kept, wanted, **ctx.options)
        return None, None, *(grad if want else None for grad, want in zip(found, wanted))


# (rule, options, *tensors) -> the result of ``rule.forward``, with the gradients of ``rule.backward``. Gradients
# to differentiate (``create_graph=True``) or batched ones (``is_grads_batched=True``) are those of the equation. No
# result may be an input or a view of one.
apply_rule = _RuleFunction.apply


def _gradients_of(equation, inputs, wanted, grads, options) -> Sequence[Optional[Tensor]]:
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: each input gets its own share, even if two inputs are one tensor or share memory.
        leaves = [
            t if not want else t.view_as(t) if twice else t.detach().requires_grad_() for t, want in zip(inputs, wanted)
        ]
        out = equation(*leaves, **options)
        asked = [t for t, want in zip(leaves, wanted) if want]
        found = iter(torch.autograd.grad(out, asked, grads, create_graph=twice, allow_unused=True))
    return [next(found) if want else None for want in wanted]
