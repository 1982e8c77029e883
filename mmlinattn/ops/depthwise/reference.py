# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return F.conv2d(x, weight, bias, 1, weight.shape[-1] // 2, 1, len(weight))


def residual_depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, of_gelu: bool = False) -> Tensor:
    x = F.gelu(x) if of_gelu else x
    return x + depthwise_conv2d(x, weight, bias)
