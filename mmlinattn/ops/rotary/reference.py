# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor


def rotate(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)
