# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Feature maps of queries and keys, by name."""

import torch
import torch.nn.functional as F
from torch import Tensor


def _elu_plus_one(x: Tensor) -> Tensor:
    # spelled out: compiled, the gradient of PyTorch's ELU comes with other strides than its own shape function says
    return torch.where(x > 0, x + 1, x.clamp(-80, 0).exp())


KERNELS = {
    'identity': lambda x: x,
    'relu': F.relu,
    'leakyrelu': F.leaky_relu,
    'elu': _elu_plus_one,  # ELU + 1; Katharopoulos et al. 2020, Eq. 7; RALA
    'exp': lambda x: torch.exp(0.2 * x),  # InLine's release
    'softmax': lambda x: x.softmax(dim=-1),  # over the channels of a head
}


def kernel_map(x: Tensor, kernel: str) -> Tensor:
    """The feature map ``kernel``, a name of :data:`KERNELS`, of (B, heads, N, d)."""
    return KERNELS[kernel](x)


def check_kernel(kernel: str, allowed: tuple[str, ...]) -> str:
    """``kernel`` itself.

    Raises:
        ValueError: If it is not one of ``allowed``.
    """
    if kernel not in allowed:
        raise ValueError(f'kernel={kernel!r} has to be one of {list(allowed)}')
    return kernel
