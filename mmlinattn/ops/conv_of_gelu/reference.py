# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor


def conv_of_gelu(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], stride: int = 1, groups: int = 1, residual: bool = False
) -> Tensor:
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
    return hidden + out if residual else out
