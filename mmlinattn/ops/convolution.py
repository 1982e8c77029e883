# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch


def dynamic_depthwise_conv2d(x: Tensor, kernels: Tensor) -> Tensor:
    """Dynamic depth-wise convolution: each image has its own kernels (InLine Eq. 6).

    Args:
        x (Tensor): (B, C, h, w), best in channels-last memory.
        kernels (Tensor): (B, C, k, k), k odd.

    Returns:
        Tensor: (B, C, h, w).
    """
    if has_torch_function((x, kernels)):  # FLOP counters count the op as a whole
        return handle_torch_function(dynamic_depthwise_conv2d, (x, kernels), x, kernels)
    if dispatch.needs_reference(x, kernels):
        return sum_of_shifts(x, kernels)
    # one grouped convolution: the channels of all images become channels of a single one, in channels-last memory
    (batch, dim, height, width), size = x.shape, kernels.shape[-1]
    if x.numel() == 0:  # PyTorch raises for a convolution without groups
        return x
    image = x.permute(2, 3, 0, 1).reshape(1, height, width, batch * dim).permute(0, 3, 1, 2)
    out = F.conv2d(image, kernels.reshape(-1, 1, size, size), padding=size // 2, groups=batch * dim)
    return out.reshape(batch, dim, height, width)


def sum_of_shifts(x: Tensor, kernels: Tensor) -> Tensor:
    # one shifted map for each kernel tap: a grouped convolution over all images would fix the batch size in a graph
    size, (height, width) = kernels.shape[-1], x.shape[-2:]
    padded = F.pad(x, [size // 2] * 4)
    out: Any = 0
    for i in range(size):
        for j in range(size):
            out = out + padded[..., i : i + height, j : j + width] * kernels[:, :, i, j, None, None]
    return out
