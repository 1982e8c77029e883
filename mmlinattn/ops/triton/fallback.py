# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What kernels and their ops do where a kernel cannot be had: one warning, and the plain form."""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

failed: set[NamedTuple] = set()  # variants that did not compile


def give_up(variant: NamedTuple, error: Exception) -> None:
    failed.add(variant)
    warnings.warn(f'mmlinattn: plain PyTorch for {variant}: {error}', stacklevel=3)


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
