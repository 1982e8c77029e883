# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ..forms import accumulation_dtype


def is_foldable(norm: Optional[nn.Module]) -> bool:
    """Whether ``norm`` is a batch norm and statistics and weights say all that it does in eval mode: subclasses and
    instances may have a ``forward`` of their own."""
    if not isinstance(norm, _BatchNorm) or norm.running_var is None or not norm.affine:
        return False
    return getattr(norm.forward, '__func__', None) in (_BatchNorm.forward, SyncBatchNorm.forward)


def fold_batch_norm(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that gives what ``conv`` and then ``norm``, in eval mode, give."""
    wide = accumulation_dtype(conv.weight)
    scale = (norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()).to(wide)
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    weight, bias = conv.weight * scale[:, None, None, None], bias * scale + norm.bias
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)
