# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor

from ..forms import records


def add(x: Tensor, out: Tensor) -> Tensor:
    return x + out if records() or x.dtype != out.dtype else out.add_(x)


def multiply(out: Tensor, factor: Tensor) -> Tensor:
    return out * factor if records() or out.dtype != factor.dtype else out.mul_(factor)
