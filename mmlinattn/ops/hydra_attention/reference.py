# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from ..forms import accumulation_dtype
from ..kernels import unit


def hydra_attention(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    wide = accumulation_dtype(q)
    state = (unit(k.to(wide)) * v).sum(dim=1, keepdim=True)  # (B, 1, C)
    return (unit(q.to(wide)) * state).to(v.dtype)
