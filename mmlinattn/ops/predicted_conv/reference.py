# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch.nn.functional as F
from torch import Tensor


def predicted_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    # one shifted map a tap: a grouped convolution of all images as channels would fix their number in a recorded graph
    size, (height, width) = kernels.shape[-1], x.shape[-2:]
    padded = F.pad(x, [size // 2] * 4)
    out = 0
    for i in range(size):
        for j in range(size):
            out = out + padded[..., i : i + height, j : j + width] * kernels[:, :, i, j, None, None]
    return out
