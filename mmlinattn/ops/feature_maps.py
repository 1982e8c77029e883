# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Feature maps of queries and keys, by name."""

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils import private_apis
from . import dispatch
from .heads import blocks

# Lower bound of exponents. Its exp, 1e-13, vanishes beside 1 in float32, and its products with itself and gradients are
# not denormal: many CPUs compute with denormal numbers a hundred times more slowly.
LOWEST_EXPONENT = -30.0


def _elu_plus_one(x: Tensor) -> Tensor:
    # Not F.elu: compiled, its gradient has other strides than its shape function reports. Not torch.where, the slowest
    # node of ONNX graphs. Not clamp(max=0), which has no gradient at its bound.
    positive = F.relu(x)
    return (x - positive).clamp(min=LOWEST_EXPONENT).exp() + positive


def _softmax(x: Tensor) -> Tensor:
    return (x - x.amax(dim=-1, keepdim=True)).clamp(min=LOWEST_EXPONENT).softmax(dim=-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    'identity': lambda x: x,
    'relu': F.relu,
    'leakyrelu': F.leaky_relu,
    'elu': _elu_plus_one,  # ELU + 1; Katharopoulos et al. 2020, Eq. 7; RALA
    'exp': lambda x: torch.exp(0.2 * x),  # InLine's release
    'softmax': _softmax,  # over the channels of a head
}


def _elu_plus_one_(x: Tensor) -> Tensor:
    # the gradient of ELU multiplies by exp(x) below 0, and by 1 above
    return private_apis.ELU_BACKWARD(x.clamp(min=0).add_(1), 1, 1, 1, False, x, grad_input=x)


def _write_elu_plus_one(out: Tensor, x: Tensor) -> Tensor:
    # not 1 + elu(x): the sum with 1 would round off the digits of small results
    for images, rows in blocks(x, x.shape[-4], x.shape[-2]):
        part = x[..., images, :, rows, :].to(out.dtype)
        exponential = part.clamp(LOWEST_EXPONENT, 0).exp_()
        torch.clamp(part, min=0, out=out[..., images, :, rows, :]).add_(exponential)
    return out


def _softmax_(x: Tensor) -> Tensor:
    return x.copy_(_softmax(x.to(torch.promote_types(x.dtype, torch.float32))))


# For each name: the feature map of (..., B, heads, N, d), in place, and its backward function (y, d_y) -> d_x. The
# latter takes the output y and overwrites its gradient d_y. Ops call write_map, which has another 'elu' for CPUs.
IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    'identity': (lambda x: x, lambda y, d_y: d_y),
    'relu': (F.relu_, lambda y, d_y: private_apis.RELU_BACKWARD(d_y, y, 0, grad_input=d_y)),
    'leakyrelu': (F.leaky_relu_, lambda y, d_y: d_y.copy_(torch.where(y > 0, d_y, d_y * 0.01))),
    'elu': (_elu_plus_one_, lambda y, d_y: d_y.mul_(y.clamp(max=1))),
    'exp': (lambda x: x.mul_(0.2).exp_(), lambda y, d_y: d_y.mul_(y).mul_(0.2)),
    'softmax': (_softmax_, lambda y, d_y: d_y.sub_((y * d_y).sum(dim=-1, keepdim=True)).mul_(y)),
}


def write_map(kernel: str, out: Tensor, x: Tensor) -> Tensor:
    """Write the feature map of ``x`` (..., B, heads, N, d) to ``out`` of the same shape, computed in the type of
    ``out``. Both may be one tensor."""
    if kernel == 'elu' and dispatch.on_cpu(x):  # one pass over memory instead of a copy and a change in place
        return _write_elu_plus_one(out, x)
    return IN_PLACE[kernel][0](out.copy_(x))


def check_kernel(kernel: str, allowed: Collection[str]) -> str:
    """Return ``kernel`` if it is one of ``allowed``.

    Raises:
        ValueError: If it is not.
    """
    if kernel not in allowed:
        raise ValueError(f'kernel={kernel!r}: expected one of {list(allowed)}')
    return kernel


def unit(x: Tensor) -> Tensor:
    """Normalise vectors along the last axis, ``x / |x|``. Zero vectors stay zero and pass gradients unchanged."""
    # squares of the largest component would leave float16 in graphs, so it is scaled to 1
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1)
    square = (x * x).sum(dim=-1, keepdim=True)  # the second derivative of a norm would be NaN at 0
    return x / torch.where(square > 0, square, 1).sqrt()
