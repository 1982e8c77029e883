# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In training, GELU is computed again in the backward pass, with the convolution after it. In inference, batch norms go
into the convolution before them, and GELU into the same pass on CPUs."""

from collections.abc import Sequence
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ..conv_of_gelu import conv_of_gelu
from ..forms import records
from ..gelu_of_conv.eager import fused
from ..memory import has_hooks, is_plain_conv
from . import reference
from .folding import fold_batch_norm


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    if not all(is_plain_conv(conv) for conv, _ in layers):
        return reference.conv_norms(x, layers)
    return _learn(x, layers) if records() else _infer(x, layers)


def _learn(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        x = conv(x) if i == 0 else conv_of_gelu(x, conv.weight, conv.bias, conv.stride[0])
        x = x if norm is None else norm(x)
    return x


def _is_fixed(norm: nn.Module) -> bool:
    """Whether it is a batch norm in eval mode and nothing else, whose statistics and weights say all."""
    if not isinstance(norm, _BatchNorm) or norm.training or norm.running_var is None or not norm.affine:
        return False
    # subclasses and instances may have a forward of their own
    plain = getattr(norm.forward, '__func__', None) in (_BatchNorm.forward, SyncBatchNorm.forward)
    return plain and not has_hooks(norm)


def _infer(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        weight, bias = conv.weight, conv.bias
        if norm is not None and _is_fixed(norm):
            weight, bias = fold_batch_norm(conv, norm)
            norm = None
        gelu = i < len(layers) - 1
        if gelu and norm is None:
            x = fused(x, weight, bias, conv)
            continue
        x = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
        x = x if norm is None else norm(x)
        x = F.gelu(x) if gelu else x
    return x
