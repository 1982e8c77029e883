# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .gradients import AnalyticGradient


def add_scaled(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """Add a residual branch with layer scale or stochastic depth: ``x + scale * branch``.

    Its gradient launches three kernels, that of ``torch.addcmul`` five.

    Args:
        x, branch (Tensor): (B, ..., C).
        scale (Tensor): Broadcastable to ``x``.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    branch, scale = branch.to(x.dtype), scale.to(x.dtype)
    if not torch.is_grad_enabled() or not dispatch.state.settled and dispatch.needs_reference(x, branch, scale):
        return torch.addcmul(x, branch, scale)
    return _AddScaled.apply({}, x, branch, scale)


class _AddScaled(AnalyticGradient):
    equation = staticmethod(torch.addcmul)

    @staticmethod
    def forward(ctx: Any, options, x, branch, scale):
        ctx.op, ctx.options = _AddScaled, options
        ctx.save_for_backward(x, branch, scale)
        return torch.addcmul(x, branch, scale)

    @staticmethod
    def gradient(grads, inputs, kept, wanted):
        (grad,), (_, branch, scale) = grads, inputs
        grad_branch = grad * scale if wanted[1] else None
        return grad, grad_branch, (grad * branch).sum_to_size(scale.shape) if wanted[2] else None
