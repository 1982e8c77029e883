# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Stems, patch embeddings and down-sampling between stages, on (B, H, W, C) feature maps."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Optional

from mmengine.model import BaseModule
from torch import Tensor, nn

from ..ops.leaves import Chain, Conv2d, ConvOfGELU, Linear, linear, shared_casts
from ..ops.maps import cut_patches, pad_by, pad_to_multiple
from ..ops.tokens import to_image
from .norms import build_branch_norm, build_map_norm, build_token_norm


class ConvStem(BaseModule):
    """RAVLT's stem: four 3x3 convolutions (strides 2 1 1 2, C/2, C/2, C/2 and C channels), a norm after each, GELU
    between.

    Args:
        in_channels (int): Channels of the image.
        dim (int): Channels C, even.
        norm_cfg (dict): Norm after each convolution.

    Shape: (B, H, W, in_channels) -> (B, ceil(H / 4), ceil(W / 4), C).
    """

    def __init__(self, in_channels: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        widths = (in_channels, dim // 2, dim // 2, dim // 2, dim)
        layers: OrderedDict = OrderedDict()  # names as in the release, where the GELUs are numbered layers too
        for i, stride in enumerate((2, 1, 1, 2)):
            kind = Conv2d if i == 0 else ConvOfGELU
            layers[str(3 * i)] = kind(widths[i], widths[i + 1], 3, stride, 1)
            layers[str(3 * i + 1)] = build_map_norm(norm_cfg, widths[i + 1])
        self.layers = Chain(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(to_image(x)).permute(0, 2, 3, 1)


class ConvDownsample(BaseModule):
    """3x3 convolution of stride 2 and a norm: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C')."""

    def __init__(self, in_dim: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        conv, norm = Conv2d(in_dim, dim, 3, 2, 1), build_map_norm(norm_cfg, dim)
        self.layers = Chain(OrderedDict(conv=conv, norm=norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(to_image(x)).permute(0, 2, 3, 1)


class PatchConv2d(Conv2d):
    """Convolution of non-overlapping patches by a matmul: (B, C, H, W) of whole patches -> (B, C', H / k, W / k).

    oneDNN's convolutions of such kernels return wrong results in bfloat16 on CPUs with AMX, for feature maps of 8 to 24
    channels (PyTorch 2.11).

    Args:
        in_channels, out_channels (int): C and C'.
        size (int): Side k of a patch.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int) -> None:
        super().__init__(in_channels, out_channels, size, size)

    def forward(self, x: Tensor) -> Tensor:
        if (self.stride, self.padding) != (self.kernel_size, (0, 0)):  # a user changed them, e.g. for a finer grid
            return super().forward(x)
        patches = cut_patches(x.permute(0, 2, 3, 1), self.kernel_size[0])
        weight, bias = shared_casts(self.weight, self.bias, x)
        weight = weight.permute(0, 2, 3, 1).flatten(1)  # (C', rows * columns * C)
        return linear(patches.flatten(3), weight, bias).permute(0, 3, 1, 2)


class PatchEmbed(BaseModule):
    """A strided convolution and a norm over channels, on inputs zero-padded at the bottom and right to whole strides.

    Args:
        in_dim (int): Channels of the input.
        dim (int): Channels C of the result.
        kernel_size, stride, padding (int): Settings of the convolution; ``kernel_size - 2 * padding`` has to
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
        self.pad: Callable[[Tensor], Tensor]
        if (kernel_size, padding) == (stride, 0):
            self.proj: nn.Module = PatchConv2d(in_dim, dim, stride)
            self.pad = partial(pad_to_multiple, step=stride)
        else:
            self.proj = Conv2d(in_dim, dim, kernel_size, stride, padding)
            self.pad = partial(pad_by, beyond=kernel_size - 2 * padding - 1)
        self.norm = None if norm_cfg is None else build_token_norm(norm_cfg, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(to_image(self.pad(x))).permute(0, 2, 3, 1)
        return x if self.norm is None else self.norm(x)


class PatchMerging(BaseModule):
    """Swin's down-sampling: concatenate each 2x2 patch, norm, linear without bias. Odd feature maps are zero-padded.

    Shape: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C').
    """

    def __init__(self, in_dim: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.norm = build_branch_norm(norm_cfg, 4 * in_dim)
        self.reduction = Linear(4 * in_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        patches = cut_patches(pad_to_multiple(x, 2), 2).transpose(3, 4)  # the neighbour below comes second
        return self.reduction(self.norm(patches.flatten(3)))
