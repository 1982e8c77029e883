# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Leaves of the module tree: linear layers, convolutions, LayerNorm and residual connections with faster operators.

Modules with the names of PyTorch's layers have their arguments and weights. On CPUs with gradients disabled,
``Linear`` and chains call operators of oneDNN. Under autocast, modules look up weights that were cast together
(:mod:`mmlinattn.forward_pass`). Graphs record PyTorch's functions.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..utils import private_apis
from . import dispatch
from .tokens import clone_if_dynamic

HALF = torch.float16, torch.bfloat16
Spans = Union[int, str, tuple[int, ...]]
Step = Callable[[Tensor], Tensor]
# a user who replaces one of these, to count or to quantise, expects that layers call it
_LINEAR, _LINEAR_FORWARD, _NORM_FORWARD = F.linear, nn.Linear.forward, nn.LayerNorm.forward


class Leaf:
    """Mixin of modules whose float32 weights a backbone casts together under autocast, once per forward pass.

    The modules look up the casts by :func:`shared_casts`.
    """


class EqualClass(type):
    """Metaclass of leaf modules; a class compares equal to the PyTorch class in its attribute ``equals``.

    Tools for quantisation and FLOP counts look layers up by their exact class (``torch.ao``, ptflops, thop). So they
    find a leaf in a dictionary or list of PyTorch's classes. Subclasses do not inherit the equality.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is cls.__dict__.get('equals', cls)

    def __hash__(cls) -> int:
        return type.__hash__(cls.__dict__.get('equals', cls))


# --- weights in half precision ----------------------------------------------------------------------------------------


class Casts(threading.local):
    """Half-precision copies of weights by the ``id`` of the weight, in the forward pass of this thread.

    The copies are a cache: a leaf without one casts its weight itself, with an equal result.
    """

    found: dict[int, Tensor] = {}


casts = Casts()


def shared_casts(weight: Any, bias: Any, x: Tensor) -> tuple[Any, Any]:
    """Return the shared casts of weight and bias for an input ``x`` under autocast, or both as given without casts."""
    found = casts.found
    if found and torch.is_autocast_enabled(x.device.type):
        return found.get(id(weight), weight), found.get(id(bias), bias)
    return weight, bias


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matmuls and convolutions of ``x``: autocast's if it is on, except for float64."""
    casts_x = x.dtype != torch.float64 and dispatch.autocasts(x)
    return torch.get_autocast_dtype(x.device.type) if casts_x else x.dtype


def cast_for_matmul(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Cast input, weight and bias to :func:`matmul_dtype`."""
    dtype = matmul_dtype(x)
    weight, bias = shared_casts(weight, bias, x)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


# --- linear layers ----------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, gelu: bool = False) -> Tensor:
    """Compute ``x @ weight.T + bias`` of (..., C), with ``gelu`` the GELU of the sum. On CPUs without gradients, one
    kernel of oneDNN computes both, in the dtype of autocast if that is on."""
    if not torch.is_grad_enabled() and takes_onednn(x, weight, bias) and weight.is_contiguous():
        x, weight, bias = cast_for_matmul(x, weight, bias)
        return private_apis.LINEAR(x, weight, bias, 'gelu' if gelu else 'none', [], 'none' if gelu else '')
    out = F.linear(x, *shared_casts(weight, bias, x))
    return F.gelu(out) if gelu else out


def takes_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> bool:
    """Return True if a linear layer or convolution may run as oneDNN's fused operator: on a CPU, outside of graphs and
    transforms, with a type and bias that oneDNN supports."""
    if dispatch.is_traced() or not dispatch.on_cpu(x) or not dispatch.onednn_takes(matmul_dtype(x)) or not x.numel():
        return False
    # oneDNN assumes that the bias is a contiguous row of the right size
    if bias is not None and not (bias.is_contiguous() and bias.shape == weight.shape[:1]):
        return False
    if F.linear is not _LINEAR or private_apis.has_function_modes():
        return False
    return not dispatch.needs_reference(x, weight, bias)


def split_linear(x: Tensor, layer: nn.Linear, widths: Sequence[int]) -> Sequence[Tensor]:
    """Apply a linear layer and split its channels: (..., C) -> (..., width) for each of ``widths``. On CPUs without
    gradients, each part is a product of its own, contiguous in memory."""
    fuses = not torch.is_grad_enabled() and fused.may_fuse(x) and fused.is_plain(layer)
    if fuses and takes_onednn(x, layer.weight, layer.bias):
        weight, bias = shared_casts(layer.weight, layer.bias, x)
        biases = [None] * len(widths) if bias is None else bias.split(widths)
        return [linear(x, *part) for part in zip(weight.split(widths), biases)]
    return layer(x).split(widths, dim=-1)


class Linear(Leaf, nn.Linear, metaclass=EqualClass):
    """``nn.Linear`` that is computed by :func:`linear`."""

    equals = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        if nn.Linear.forward is not _LINEAR_FORWARD:
            return super().forward(x)
        if torch.is_grad_enabled():
            return F.linear(x, *shared_casts(self.weight, self.bias, x))
        return linear(x, self.weight, self.bias)


# --- norms and residual connections -----------------------------------------------------------------------------------


class LayerNorm(Leaf, nn.LayerNorm, metaclass=EqualClass):
    """``nn.LayerNorm`` at the start of a residual branch. Under autocast, an input in half precision keeps its type.

    PyTorch's kernel computes statistics in float32. Autocast would cast the map to float32, and the next linear layer
    would cast it back.
    """

    equals = nn.LayerNorm

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in HALF or x.is_meta or nn.LayerNorm.forward is not _NORM_FORWARD:
            return super().forward(x)
        device = x.device.type
        if not torch.is_autocast_enabled(device) or torch.compiler.is_dynamo_compiling():
            return super().forward(x)
        weight, bias = shared_casts(self.weight, self.bias, x)
        weight = None if weight is None else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        torch.set_autocast_enabled(device, False)
        try:
            return torch.layer_norm(x, self.normalized_shape, weight, bias, self.eps, False)
        finally:
            torch.set_autocast_enabled(device, True)


class MapLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W) maps, the layout in which tools expect a backbone's last norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def add_scaled(x: Tensor, branch: Tensor, gamma: Optional[Tensor], drop_path: nn.Module) -> Tensor:
    """Add a residual branch, ``x + DropPath(gamma * branch)``. Stochastic depth acts on gamma for each image, not on
    the feature map.

    The gradient launches three kernels, that of ``torch.addcmul`` five.

    Args:
        x, branch (Tensor): (B, ..., C).
        gamma (Tensor, optional): Layer scale, (C,); None for none.
        drop_path (nn.Module): MMCV's ``DropPath``, or ``nn.Identity``.

    Returns:
        Tensor: In the shape of ``x``.
    """
    drops = drop_path.training and not isinstance(drop_path, nn.Identity)
    if gamma is None and not drops:
        return x + branch
    scale = x.new_ones(1) if gamma is None else shared_casts(gamma, None, x)[0]
    if drops:
        scale = drop_path(scale.expand(x.shape[0], *(1,) * (x.dim() - 2), len(scale)))
    branch, scale = branch.to(x.dtype), scale.to(x.dtype)
    if not torch.is_grad_enabled() or dispatch.needs_reference(x, branch, scale):
        return torch.addcmul(x, branch, scale)
    return _AddScaled.apply({}, x, branch, scale)


def _add_scaled_backward(grads, inputs, kept, wanted):
    (grad,), (_, branch, scale) = grads, inputs
    grad_branch = grad * scale if wanted[1] else None
    return grad, grad_branch, (grad * branch).sum_to_size(scale.shape) if wanted[2] else None


_AddScaled = dispatch.function_of(torch.addcmul, gradient=_add_scaled_backward)


# --- convolutions -----------------------------------------------------------------------------------------------------


class Conv2d(Leaf, nn.Conv2d, metaclass=EqualClass):
    """``nn.Conv2d`` that looks up its cast weights."""

    equals = nn.Conv2d

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return super()._conv_forward(input, *shared_casts(weight, bias, input))


def residual_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], stride, padding, dilation, groups) -> Tensor:
    """Compute ``x + F.conv2d(x, ...)`` of (B, C, H, W).

    On CPUs without gradients, one kernel computes a depth-wise convolution with the residual: 1 is added to the central
    tap of ``weight``. Half precision would round the tap, so it takes two kernels.
    """
    if not torch.is_grad_enabled() and _adds_by_tap(x, weight, bias, (stride, padding, dilation, groups)):
        weight = weight.clone()
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] += 1
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return x + F.conv2d(x, *shared_casts(weight, bias, x), stride, padding, dilation, groups)


def _adds_by_tap(x: Tensor, weight: Tensor, bias: Optional[Tensor], settings: tuple) -> bool:
    """Return True if the central tap may add the residual; ``settings`` are stride, padding, dilation and groups."""
    dim, inputs, rows, columns = weight.shape
    if settings != ((1, 1), (rows // 2, columns // 2), (1, 1), dim) or inputs != 1:
        return False
    return dispatch.writes_in_place(x, weight, bias) and matmul_dtype(x).itemsize >= 4


def conv_of_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    stride: Spans = 1,
    padding: Spans = 0,
    dilation: Spans = 1,
    groups: int = 1,
    residual: bool = False,
) -> Tensor:
    """Convolution of ``gelu(x)``, plus ``gelu(x)`` if ``residual``. Only ``x`` is kept for the backward pass.

    The backward pass recomputes GELU, which is cheap. In stems and hidden layers the results of GELU are among the
    largest tensors that autograd would keep. Autograd keeps them if ``x`` is float32 under autocast, or ``padding`` a
    string.

    Args:
        x (Tensor): (B, C, H, W), in any memory format.
        weight (Tensor): (C', C / groups, k, k).
        bias (Tensor, optional): (C',).
        stride, padding, dilation, groups: As in ``F.conv2d``.
        residual (bool): Add ``gelu(x)``; needs C' = C and a feature map of the same size.

    Returns:
        Tensor: (B, C', H', W'), as of ``F.conv2d``.
    """
    settings = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, residual=residual)
    is_plain = not torch.is_grad_enabled() or x.numel() == 0 or isinstance(padding, str)
    # under autocast, F.conv2d casts float32 feature maps
    is_plain = is_plain or (x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type))
    if is_plain or dispatch.needs_reference(x, weight, bias):
        return conv_of_gelu_reference(x, weight, bias, **settings)
    weight, bias = shared_casts(weight, bias, x)
    return _ConvOfGELU.apply(settings, x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def conv_of_gelu_reference(x, weight, bias, stride, padding, dilation, groups, residual) -> Tensor:
    hidden = F.gelu(x)
    if residual:
        return residual_conv(hidden, weight, bias, stride, padding, dilation, groups)
    return F.conv2d(hidden, *shared_casts(weight, bias, hidden), stride, padding, dilation, groups)


def _conv_of_gelu_forward(x, weight, bias, stride, padding, dilation, groups, residual):
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, padding, dilation, groups)
    return hidden + out if residual else out, ()


def _conv_of_gelu_backward(grads, inputs, kept, wanted, stride, padding, dilation, groups, residual):
    """Return the gradients of ``x``, ``weight`` and ``bias``; for the arguments see :func:`.dispatch.function_of`."""
    (grad,), (x, weight, _) = grads, inputs
    spans = ([span] * 2 if isinstance(span, int) else list(span) for span in (stride, padding, dilation))
    steps = *spans, False, [0, 0], groups
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad, F.gelu(x), weight, [len(weight)], *steps, wanted
    )
    if grad_x is not None:
        grad_x = torch.ops.aten.gelu_backward(grad_x + grad if residual else grad_x, x)
    return grad_x, grad_weight, grad_bias


_ConvOfGELU = dispatch.function_of(conv_of_gelu_reference, _conv_of_gelu_forward, _conv_of_gelu_backward)


class ConvOfGELU(Conv2d):
    """Convolution of ``gelu(x)``; with zero padding, only ``x`` is kept for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.padding_mode != 'zeros':
            return super().forward(F.gelu(x))
        return conv_of_gelu(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ResidualDWConv(Conv2d):
    """``y + DWConv(y)`` on (B, H, W, C) feature maps: conditional position encoding, and the local term of RAVLT's FFN.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd size of the depth-wise convolution.
        of_gelu (bool): Take ``y = gelu(x)`` and keep only ``x`` for the backward pass; False takes ``y = x``.
    """

    def __init__(self, dim: int, kernel_size: int = 3, of_gelu: bool = False) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.of_gelu = of_gelu

    def forward(self, x: Tensor) -> Tensor:
        image = clone_if_dynamic(x.permute(0, 3, 1, 2))
        settings = self.stride, self.padding, self.dilation, self.groups
        if self.padding_mode != 'zeros':
            image = F.gelu(image) if self.of_gelu else image
            image = image + super().forward(image)
        elif self.of_gelu:
            image = conv_of_gelu(image, self.weight, self.bias, *settings, residual=True)
        else:
            image = residual_conv(image, self.weight, self.bias, *settings)
        return image.permute(0, 2, 3, 1)


# --- chains of layers -------------------------------------------------------------------------------------------------


def chain(x: Tensor, *steps: Step) -> Tensor:
    """Call ``steps`` (modules and functions of one tensor) one after another; on CPUs without gradients they are fused
    (:mod:`.fused`)."""
    if not torch.is_grad_enabled() and fused.may_fuse(x):
        return fused.chain(x, steps)
    for step in steps:
        x = step(x)
    return x


class Chain(nn.Sequential):
    """``nn.Sequential`` that calls its layers by :func:`chain`, which fuses them on CPUs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, *self)


from . import fused  # noqa: E402  imports the classes above
