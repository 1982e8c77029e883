# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Gradients where a kernel does not serve."""

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor


def gradients(
    plain: Callable[..., Tensor], grad: Tensor, tensors: Sequence[Optional[Tensor]], wanted: Sequence[bool]
) -> list[Optional[Tensor]]:
    """Gradients of the wanted tensors through the plain form, differentiable themselves where grad mode is on."""
    twice = torch.is_grad_enabled()
    if not twice:
        tensors = [t.detach().requires_grad_() if want else t for t, want in zip(tensors, wanted)]
    with torch.enable_grad():
        out = plain(*tensors)
        leaves = [t for t, want in zip(tensors, wanted) if want]
        grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=twice, allow_unused=True))
    return [next(grads) if want else None for want in wanted]
