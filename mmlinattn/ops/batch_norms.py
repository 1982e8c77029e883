# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Batch norms, and folding of their statistics into the convolution before them."""

from typing import Optional

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from typing_extensions import TypeGuard

from ..utils.private_apis import is_altered
from .dispatch import accumulation_dtype


def is_batch_norm(module: nn.Module) -> bool:
    """Return True for a batch norm, including MMCV's ``MMSyncBN`` that does not subclass PyTorch's ``_BatchNorm``."""
    return isinstance(module, _BatchNorm) or type(module).__name__ == 'SyncBatchNorm'


def is_foldable(norm: Optional[nn.Module]) -> TypeGuard[_BatchNorm]:
    """Return True if a norm can be folded into the layer before it: an unaltered batch norm with running statistics,
    weight and bias."""
    if not isinstance(norm, _BatchNorm) or is_altered(norm):
        return False
    if norm.running_var is None or norm.weight is None or norm.bias is None:
        return False
    return type(norm).forward in (_BatchNorm.forward, SyncBatchNorm.forward)


def fold_batch_norm(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution that equals ``conv`` followed by ``norm`` in eval mode."""
    wide = accumulation_dtype(conv.weight)
    assert norm.running_mean is not None and norm.running_var is not None  # see is_foldable
    scale = (norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()).to(wide)
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    weight, bias = conv.weight * scale[:, None, None, None], bias * scale + norm.bias
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)
