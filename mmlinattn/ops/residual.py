# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor

from . import dispatch
from .gradients import GradientRule, apply_rule


def add_scaled(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """``x + scale * branch``, a residual connection with layer scale or stochastic depth.

    Its gradient takes three operations, that of ``torch.addcmul`` five.

    Args:
        x, branch (Tensor): (B, ..., C).
        scale (Tensor): Broadcastable to ``x``.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    branch, scale = branch.to(x.dtype), scale.to(x.dtype)
    if not torch.is_grad_enabled() or not dispatch.state.settled and dispatch.needs_reference(x, branch, scale):
        return torch.addcmul(x, branch, scale)
    return apply_rule(_RULE, {}, x, branch, scale)


def _forward(x, branch, scale):
    return torch.addcmul(x, branch, scale), ()


def _backward(grads, inputs, kept, wanted):
    (grad,), (_, branch, scale) = grads, inputs
    grad_branch = grad * scale if wanted[1] else None
    return grad, grad_branch, (grad * branch).sum_to_size(scale.shape) if wanted[2] else None


_RULE = GradientRule(torch.addcmul, _forward, _backward)
