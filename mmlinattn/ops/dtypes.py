# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Data types of sums and matmuls."""

import torch
from torch import Tensor

from . import dispatch


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the type of sums, angles and interpolation: float32 for half precision, the type of ``x`` otherwise."""
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(q: Tensor, v: Tensor) -> torch.dtype:
    """Return the type of an op's matmuls: bfloat16 on GPUs for bfloat16 inputs, float32 for other half precision.
    float16 is not used, since quotients leave its range."""
    if q.dtype == v.dtype == torch.bfloat16 and not dispatch.on_cpu(q):
        return torch.bfloat16
    return torch.promote_types(accumulation_dtype(q), v.dtype)
