# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

import torch.nn.functional as F
from torch import Tensor, nn


def scaled_linear(linear: nn.Module, x: Tensor, scale: Optional[Tensor]) -> Tensor:
    """``linear(x) * scale`` with the scale (C,) in the matrix: no pass over the map, and no map kept for its gradient.

    Not for half precision: there, small scales would underflow.
    """
    if scale is None:
        return linear(x)
    if type(linear) is not nn.Linear:  # an adapter in its place
        return linear(x) * scale
    return F.linear(x, linear.weight * scale[:, None], linear.bias * scale)
