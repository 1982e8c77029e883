# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From images to maps, and from a map to the next coarser one. Maps are (B, H, W, C)."""

import torch
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn


class ConvStem(BaseModule):
    """RAVLT's stem: four 3x3 convolutions (strides 2 1 1 2, widths C/2 C/2 C/2 C), a norm after each, GELU between.

    Args:
        in_channels (int): Channels of the image.
        dim (int): Width C, even.
        norm_cfg (dict): Norm after each convolution.

    Shape: (B, in_channels, H, W) -> (B, ceil(H / 4), ceil(W / 4), C).
    """

    def __init__(self, in_channels: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        widths = (in_channels, dim // 2, dim // 2, dim // 2, dim)
        layers = []
        for i, stride in enumerate((2, 1, 1, 2)):
            layers += [
                nn.Conv2d(widths[i], widths[i + 1], 3, stride, 1),
                build_norm_layer(norm_cfg, widths[i + 1])[1],
                nn.GELU(),
            ]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image.contiguous(memory_format=torch.channels_last)).permute(0, 2, 3, 1)


class ConvDownsample(BaseModule):
    """3x3 convolution of stride 2 and a norm: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C')."""

    def __init__(self, in_dim: int, dim: int, norm_cfg: dict, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.layers = nn.Sequential(nn.Conv2d(in_dim, dim, 3, 2, 1), build_norm_layer(norm_cfg, dim)[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
