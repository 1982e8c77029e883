# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""oneDNN's fused operators: private ones of PyTorch, which not every build has."""

import torch
from torch import Tensor

from .forms import autocasts

LINEAR = getattr(torch.ops.mkldnn, '_linear_pointwise', None)
CONV = getattr(torch.ops.mkldnn, '_convolution_pointwise', None)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused operators serve these tensors: on a CPU, in float32, not empty."""
    if LINEAR is None or CONV is None or autocasts(x) or not torch.backends.mkldnn.enabled:
        return False
    return x.dtype == weight.dtype == torch.float32 and x.numel() > 0


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of (..., K) and (N, K). oneDNN copies an ``a`` with gaps; on such a ``b`` it is a thousand times
    slower, so that it is copied here."""
    return LINEAR(a, b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous(), None, 'none', [], '')
