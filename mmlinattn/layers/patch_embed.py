# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convolutions from images to maps, and from a map to the next coarser one. Maps are (B, H, W, C)."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Optional

import torch.nn.functional as F
from einops import rearrange
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from typing_extensions import TypeGuard

from .. import ops
from ..ops import dispatch
from ..ops.sizes import is_known, round_up
from ..ops.tensors import settled, to_image
from .linear import apply_linear, has_hooks, is_just


def build_map_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """A norm of (B, C, H, W) maps.

    Raises:
        ValueError: For one over the last axis.
    """
    norm = build_norm_layer(norm_cfg, dim)[1]
    if type(norm) is nn.LayerNorm:
        raise ValueError(f"norm_cfg={norm_cfg} has to be a norm of (B, C, H, W) maps, as 'BN', 'SyncBN' or 'GN'")
    return norm


class ConvStem(BaseModule):
    """RAVLT's stem: four 3x3 convolutions (strides 2 1 1 2, widths C/2 C/2 C/2 C), a norm after each, GELU between.

    Args:
        in_channels (int): Channels of the image.
        dim (int): Width C, even.
        norm_cfg (dict): Norm after each convolution.

    Shape: (B, H, W, in_channels) -> (B, ceil(H / 4), ceil(W / 4), C).
    """

    def __init__(self, in_channels: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        widths = (in_channels, dim // 2, dim // 2, dim // 2, dim)
        layers = []
        for i, stride in enumerate((2, 1, 1, 2)):
            layers += [
                nn.Conv2d(widths[i], widths[i + 1], 3, stride, 1),
                build_map_norm(norm_cfg, widths[i + 1]),
                nn.GELU(),
            ]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        pairs: list[tuple[nn.Conv2d, Optional[nn.Module]]] = []
        norm = None
        for layer in reversed(self.layers):  # norms are missing where they were folded for deployment
            if isinstance(layer, nn.Conv2d):
                pairs.insert(0, (layer, norm))
                norm = None
            elif not isinstance(layer, nn.GELU):
                norm = layer
        return conv_norms(to_image(x), pairs).permute(0, 2, 3, 1)


class ConvDownsample(BaseModule):
    """3x3 convolution of stride 2 and a norm: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C')."""

    def __init__(self, in_dim: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        conv, norm = nn.Conv2d(in_dim, dim, 3, 2, 1), build_map_norm(norm_cfg, dim)
        self.layers = nn.Sequential(OrderedDict(conv=conv, norm=norm))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        norm = getattr(layers, 'norm', None)  # None where it was folded for deployment
        return conv_norms(to_image(x), [(layers.conv, norm)]).permute(0, 2, 3, 1)


def pad_for(conv: Any, x: Tensor) -> Tensor:
    """Zero-pad (B, H, W, C) at the bottom and right so that ``conv`` gives ceil(H / stride) x ceil(W / stride).

    By the same number at every size: where whole strides need fewer, the convolution does not read the rest. So graphs
    hold for sizes other than their own.
    """
    beyond = conv.kernel_size[0] - 2 * conv.padding[0] - 1
    return F.pad(x, (0, 0, 0, beyond, 0, beyond)) if beyond else x


def strided_conv(conv: Any, x: Tensor) -> Tensor:
    """``conv`` on a map zero-padded at the bottom and right to whole strides: (B, H, W, C) -> (B, ceil(H / stride),
    ceil(W / stride), C').

    Without overlap of the patches it is a matrix product of them, and computed so: oneDNN's convolutions of such
    kernels give wrong numbers in bfloat16 on CPUs with AMX, in silence, where the map has 8 to 24 channels (PyTorch
    2.11).
    """
    no_overlap = is_plain_conv(conv) and conv.kernel_size == conv.stride and conv.padding == (0, 0)
    if not (no_overlap and conv.groups == 1 and conv.dilation == (1, 1)):
        return conv(to_image(pad_for(conv, x))).permute(0, 2, 3, 1)
    weight = rearrange(conv.weight, 'o i rows columns -> o (rows columns i)')
    return ops.linear(patches(x, *conv.kernel_size).flatten(3), weight, conv.bias)


def patches(x: Tensor, rows: int, columns: int) -> Tensor:
    """(B, H, W, C), zero-padded at the bottom and right to whole patches -> (B, h, w, rows, columns, C)."""
    height, width = x.shape[1:3]
    beyond = (round_up(width, columns) - width, round_up(height, rows) - height)
    if not is_known(height, width) or any(beyond):  # padding by nothing would copy the map
        x = F.pad(x, (0, 0, 0, beyond[0], 0, beyond[1]))
    return settled(x.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).transpose(2, 3))


class PatchEmbed(BaseModule):
    """A strided convolution and a norm over channels, on maps zero-padded at the bottom and right to whole strides.

    Args:
        in_dim (int): Channels of the map.
        dim (int): Width C of the result.
        kernel_size, stride, padding (int): Of the convolution; ``kernel_size - 2 * padding`` has to
            be positive and may not exceed the stride.
        norm_cfg (dict, optional): Norm over channels; None for none.

    Shape: (B, H, W, in_dim) -> (B, ceil(H / stride), ceil(W / stride), C).
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        kernel_size: int,
        stride: int,
        padding: int = 0,
        norm_cfg: Optional[dict] = None,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.proj = nn.Conv2d(in_dim, dim, kernel_size, stride, padding)
        self.norm = None if norm_cfg is None else build_norm_layer(norm_cfg, dim)[1]

    def forward(self, x: Tensor) -> Tensor:
        x = strided_conv(self.proj, x)
        return x if self.norm is None else self.norm(x)


class PatchMerging(BaseModule):
    """Swin's down-sampling: four neighbours side by side, norm, linear without bias. Odd maps are zero-padded.

    Shape: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C').
    """

    def __init__(self, in_dim: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.norm = build_norm_layer(norm_cfg, 4 * in_dim)[1]
        self.reduction = nn.Linear(4 * in_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        neighbours = patches(x, 2, 2).transpose(3, 4).flatten(3)  # of the four, the one below comes second
        return apply_linear(self.reduction, self.norm(neighbours))


# --- convolutions with a norm after each and GELU between, folded in inference ----------------------------------------


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    """Convolutions, a norm after each, GELU between them.

    In training, GELU is computed again in the backward pass, with the convolution after it. In inference, batch norms
    go into the convolution before them, and GELU into the same pass on CPUs.

    Args:
        x (Tensor): (B, C, H, W).
        layers (Sequence): Pairs of a convolution (odd kernel, padding ``k // 2``, groups in a single one only) and its
            norm, or None.

    Returns:
        Tensor: (B, C', H', W').
    """
    if dispatch.is_plain(x) or not all(is_plain_conv(conv) for conv, _ in layers):
        for i, (conv, norm) in enumerate(layers):
            x = conv(x if i == 0 else F.gelu(x))
            x = x if norm is None else norm(x)
        return x
    return _learn(x, layers) if dispatch.records() else _infer(x, layers)


def _learn(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        x = conv(x) if i == 0 else ops.conv_of_gelu(x, conv.weight, conv.bias, conv.stride[0])
        x = x if norm is None else norm(x)
    return x


def _infer(x: Tensor, layers) -> Tensor:
    for i, (conv, norm) in enumerate(layers):
        weight, bias = conv.weight, conv.bias
        if is_foldable(norm) and not norm.training and not has_hooks(norm):
            weight, bias = fold_batch_norm(conv, norm)
            norm = None
        gelu = i < len(layers) - 1
        if gelu and norm is None:
            x = ops.gelu_of_conv(x, weight, bias, conv.stride[0], conv.padding[0], conv.groups)
            continue
        x = F.conv2d(x, weight, bias, conv.stride, conv.padding, 1, conv.groups)
        x = x if norm is None else norm(x)
        x = F.gelu(x) if gelu else x
    return x


def is_foldable(norm: Optional[nn.Module]) -> TypeGuard[_BatchNorm]:
    """Whether ``norm`` is a batch norm and statistics and weights say all that it does in eval mode: subclasses and
    instances may have a ``forward`` of their own."""
    if not isinstance(norm, _BatchNorm) or norm.running_var is None or not norm.affine:
        return False
    return getattr(norm.forward, '__func__', None) in (_BatchNorm.forward, SyncBatchNorm.forward)


def fold_batch_norm(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that gives what ``conv`` and then ``norm``, in eval mode, give."""
    wide = dispatch.accumulation_dtype(conv.weight)
    assert norm.running_mean is not None and norm.running_var is not None  # see is_foldable
    scale = (norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()).to(wide)
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    weight, bias = conv.weight * scale[:, None, None, None], bias * scale + norm.bias
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)


def is_plain_conv(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether ``layer`` is a zero-padded convolution and nothing else."""
    plain = is_just(nn.Conv2d, layer) and not has_hooks(layer)
    return plain and layer.padding_mode == 'zeros' and not isinstance(layer.padding, str)
