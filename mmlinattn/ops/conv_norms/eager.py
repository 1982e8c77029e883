# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In training, GELU is computed again in the backward pass, with the convolution after it. In inference, batch norms go
into the convolution before them, and GELU into the same pass on CPUs."""

from collections.abc import Sequence
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn

from ..conv_of_gelu import conv_of_gelu
from ..forms import records
from ..gelu_of_conv.eager import fused
from ..memory import has_hooks, is_plain_conv
from . import reference
from .folding import fold_batch_norm, is_foldable


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    if not all(is_plain_conv(conv) for conv, _ in layers):
        return reference.conv_norms(x, layers)
    return _learn(x, layers) if records() else _infer(x, layers)


def _learn(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        x = conv(x) if i == 0 else conv_of_gelu(x, conv.weight, conv.bias, conv.stride[0])
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
            x = fused(x, weight, bias, conv)
            continue
        x = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
        x = x if norm is None else norm(x)
        x = F.gelu(x) if gelu else x
    return x
