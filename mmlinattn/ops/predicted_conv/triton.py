# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor

from ..depthwise.triton_op import convolve
from . import eager


def predicted_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    out = convolve(x, kernels, None)
    return eager.predicted_conv2d(x, kernels) if out is None else out
