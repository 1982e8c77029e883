# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolution by GPU kernels, as a registered pair of ops; kernels of each image's own, too."""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..convolution import depthwise_conv2d_reference, sum_of_shifts
from . import attention_launch, canary, compat, fallback, spot_check
from . import depthwise_kernels as kernels
from .attention_launch import NoKernel, cdiv, launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_SIZES = (3, 5)
ROWS, COLUMNS, WIDTH = kernels.ROWS, 8, 64
PROGRAMS, FEWEST_PLACES = 2048, 512


def _channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) as (B, H, W, C) with the channels side by side."""
    x = x.permute(0, 2, 3, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _taps(weight: Tensor) -> Tensor:
    """(B or 1, C, k, k) -> (B or 1, k k, C)."""
    return weight.flatten(2).transpose(1, 2).contiguous()


def _convolve(x: Tensor, taps: Tensor, bias: Optional[Tensor], size: int, flip: bool, residual: bool) -> Tensor:
    x = _channels_last(x)
    batch, height, width, channels = x.shape
    out = attention_launch.empty(batch, height, width, channels, dtype=x.dtype, device=x.device)
    across = cdiv(width, COLUMNS)
    tiles = across * cdiv(height, ROWS)
    launch(
        kernels.convolve, (batch * tiles, cdiv(channels, WIDTH)), x.device,
        x, taps, bias, out, *x.stride()[:3], *out.stride()[:3], taps.stride(0) if len(taps) > 1 else 0,
        height, width, channels, across, tiles,
        K=size, FLIP=flip, HAS_BIAS=bias is not None, RESIDUAL=residual,
        COLUMNS=COLUMNS, WIDTH=WIDTH, num_warps=2,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


@torch.library.custom_op('mmlinattn::depthwise_conv2d', mutates_args=())
def op(x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: bool, of_gelu: bool) -> Tensor:
    x = F.gelu(x) if of_gelu else x
    return _convolve(x, _taps(weight), bias, weight.shape[-1], False, residual)


@op.register_fake
def _(x, weight, bias, residual, of_gelu):
    return torch.empty_like(x, memory_format=torch.channels_last)


@torch.library.custom_op('mmlinattn::depthwise_conv2d_backward', mutates_args=())
def op_backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual: bool, of_gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    before, x = x, F.gelu(x) if of_gelu else x
    grad_x = _convolve(grad, _taps(weight), None, weight.shape[-1], True, residual)
    if of_gelu:
        grad_x = torch.ops.aten.gelu_backward(grad_x, before)
    x, grad = _channels_last(x), _channels_last(grad)
    (batch, height, width, channels), size = x.shape, weight.shape[-1]
    places, wide = height * width, cdiv(channels, WIDTH)
    splits = min(cdiv(PROGRAMS, batch * wide * size), cdiv(places, FEWEST_PLACES))
    span = cdiv(cdiv(places, splits), 16) * 16
    splits = cdiv(places, span)
    sums = dict(dtype=torch.float32, device=x.device)
    parts = attention_launch.empty(batch, splits, size * size, channels, **sums)
    bias_parts = attention_launch.empty(batch, splits, channels, **sums)
    launch(
        kernels.correlate, (batch * size * splits, wide), x.device,
        x, grad, parts, bias_parts, *x.stride()[:3], *grad.stride()[:3], height, width, places, channels, span, splits,
        K=size, TAPS=1 << (size - 1).bit_length(), PLACES=16, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip
    # of each image, or of all
    over = (1,) if len(weight) > 1 or batch == 1 else (0, 1)
    summed = parts.sum(dim=over).reshape(len(weight), size * size, channels)
    grad_weight = summed.transpose(1, 2).to(weight.dtype).contiguous().view(weight.shape)
    return grad_x, grad_weight, bias_parts.sum(dim=(0, 1)).to(weight.dtype)


@op_backward.register_fake
def _(grad, x, weight, residual, of_gelu):
    grad_x = torch.empty_like(x, memory_format=torch.channels_last)
    return grad_x, weight.new_empty(weight.shape), weight.new_empty(x.shape[1])


def _setup(ctx, inputs, output):
    x, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx, grad):
    x, weight, bias = ctx.saved_tensors
    if not torch.is_grad_enabled():
        try:
            grads = op_backward(grad, x, weight, *ctx.options)
            return *grads[:2], None if bias is None else grads[2].to(bias.dtype), None, None
        except NoKernel as error:
            canary.fail(variant_of(x, weight, bias, ctx.options[0], x.dtype), 'backward', error)
    grads = fallback.gradients(lambda *t: _plain(*t, *ctx.options), grad, (x, weight, bias), ctx.needs_input_grad[:3])
    return *grads, None, None


op.register_autograd(_backward, setup_context=_setup)


def _plain(x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: bool, of_gelu: bool) -> Tensor:
    x = F.gelu(x) if of_gelu else x
    one_kernel = len(weight) == 1
    out = depthwise_conv2d_reference(x, weight[0].unsqueeze(1), bias) if one_kernel else sum_of_shifts(x, weight)
    return x + out if residual else out


class Variant(NamedTuple):
    """What kernels are compiled for, one binary each."""

    op: str
    dtype: torch.dtype
    size: int
    device: torch.device
    biased: bool
    residual: bool
    aligned: bool  # channels are a multiple of 16

    def __str__(self) -> str:
        return f'depth-wise convolutions ({self.dtype}, {self.size}x{self.size})'


def variant_of(x: Tensor, weight: Tensor, bias: Optional[Tensor], residual: bool, dtype: torch.dtype) -> Variant:
    aligned = x.shape[1] % 16 == 0
    return Variant('depthwise_conv2d', dtype, weight.shape[-1], x.device, bias is not None, residual, aligned)


def serves(x: Tensor, weight: Tensor, bias: Optional[Tensor], of_each: bool, casts: bool) -> bool:
    """Whether there is a kernel for these tensors, of exactly the shapes of :func:`convolve`. Where not, PyTorch's own
    convolutions broadcast or raise."""
    if x.dim() != 4 or x.numel() == 0:
        return False
    tensors = [t for t in (x, weight, bias) if t is not None]
    images, channels = x.shape[:2]
    size = weight.shape[-1]
    return (
        size in KERNEL_SIZES
        and weight.shape == ((images, channels) if of_each else (channels, 1)) + (size, size)
        and (bias is None or bias.shape == (channels,))
        and all(t.dtype in DTYPES and (casts or t.dtype == x.dtype) and t.device == x.device for t in tensors)
        and (x.is_cuda or compat.INTERPRETED)
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: bool = False,
    of_gelu: bool = False,
    of_each: bool = False,
) -> Optional[Tensor]:
    """``DWConv(x)``, plus ``x`` where ``residual``; None where there is no kernel for it.

    Args:
        x (Tensor): (B, C, H, W), best in channels-last memory.
        weight (Tensor): (C, 1, k, k), or (B, C, k, k) where ``of_each``; k of 3 or 5.
        bias (Tensor, optional): (C,), not with kernels of each image's own.
        residual (bool): Add ``x``.
        of_gelu (bool): Of ``gelu(x)``, which is computed again in the backward pass.
        of_each (bool): Each image has kernels of its own.
    """
    dtype, casts = x.dtype, dispatch.autocasts(x)
    if casts:
        dtype = torch.get_autocast_dtype(x.device.type)
        if residual and x.dtype != dtype:
            return None  # the sum would be rounded
    if weight.dim() != 4 or not serves(x, weight, bias, of_each, casts):
        return None
    variant = variant_of(x, weight, bias, residual, dtype)
    learns = dispatch.records() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not dispatch.is_traced() and not canary.allows(variant, learns):
        return None
    weight = weight if of_each else weight.transpose(0, 1)
    bias = None if bias is None else bias.to(dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    try:
        if not dispatch.is_traced() and spot_check.is_due(variant, 'forward', x.shape):
            with torch.no_grad():
                out = op(x, weight, bias, residual, of_gelu)[-1:].permute(0, 2, 3, 1)
                last = (x[-1:], weight[-1:], bias)

                def expected(to):
                    parts = [None if t is None else t.to(to) for t in last]
                    return [_plain(*parts, residual, of_gelu).permute(0, 2, 3, 1)]

                if not spot_check.agrees(variant, 'forward', [out], expected):
                    return None
        return op(x, weight, bias, residual, of_gelu)
    except NoKernel as error:
        canary.fail(variant, 'forward', error)
        return None
