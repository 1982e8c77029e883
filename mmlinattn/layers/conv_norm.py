# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolutions with a norm after each and GELU between, folded in inference."""

from collections.abc import Sequence
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from typing_extensions import TypeGuard

from .. import ops
from ..ops import dispatch
from .plain import has_hooks, is_plain_conv


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    """Convolutions, a norm after each, GELU between them.

    In training, GELU is computed again in the backward pass, with the convolution after it. In inference, batch norms
    go into the convolution before them, and GELU into the same pass on CPUs.

    Args:
        x (Tensor): (B, C, H, W).
        layers (Sequence): Pairs of a convolution (odd kernel, padding ``k // 2``, groups in a single one only) and its
            norm, or None.

    Returns:
        Tensor: (B, C', H', W').
    """
    if dispatch.is_plain(x) or not all(is_plain_conv(conv) for conv, _ in layers):
        for i, (conv, norm) in enumerate(layers):
            x = conv(x if i == 0 else F.gelu(x))
            x = x if norm is None else norm(x)
        return x
    return _learn(x, layers) if dispatch.records() else _infer(x, layers)


def _learn(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        x = conv(x) if i == 0 else ops.conv_of_gelu(x, conv.weight, conv.bias, conv.stride[0])
        x = x if norm is None else norm(x)
    return x


def _infer(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        weight, bias = conv.weight, conv.bias
        if is_foldable(norm) and not norm.training and not has_hooks(norm):
            weight, bias = fold_batch_norm(conv, norm)
            norm = None
        gelu = i < len(layers) - 1
        if gelu and norm is None:
            x = ops.gelu_of_conv(x, weight, bias, conv.stride[0], conv.padding[0], conv.groups)
            continue
        x = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
        x = x if norm is None else norm(x)
        x = F.gelu(x) if gelu else x
    return x


def is_foldable(norm: Optional[nn.Module]) -> TypeGuard[_BatchNorm]:
    """Whether ``norm`` is a batch norm and statistics and weights say all that it does in eval mode: subclasses and
    instances may have a ``forward`` of their own."""
    if not isinstance(norm, _BatchNorm) or norm.running_var is None or not norm.affine:
        return False
    return getattr(norm.forward, '__func__', None) in (_BatchNorm.forward, SyncBatchNorm.forward)


def fold_batch_norm(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that gives what ``conv`` and then ``norm``, in eval mode, give."""
    wide = dispatch.accumulation_dtype(conv.weight)
    assert norm.running_mean is not None and norm.running_var is not None  # see is_foldable
    scale = (norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()).to(wide)
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    weight, bias = conv.weight * scale[:, None, None, None], bias * scale + norm.bias
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)
