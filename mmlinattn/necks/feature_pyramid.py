# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections import OrderedDict
from collections.abc import Sequence
from typing import Optional, Union

import torch.nn.functional as F
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS
from torch import Tensor, nn

from ..layers import MapLayerNorm

STRIDES = (4, 8, 16, 32)


def resample(dim: int, stride: int) -> tuple[nn.Module, int]:
    """Return the layers from a feature map of stride 16 with ``dim`` channels to one of ``stride``, and the channels
    of their result. Each doubling of the size halves the channels."""
    if stride == 4:
        layers = dict(
            up1=nn.ConvTranspose2d(dim, dim // 2, 2, 2),
            norm=MapLayerNorm(dim // 2, eps=1e-6),
            act=nn.GELU(),
            up2=nn.ConvTranspose2d(dim // 2, dim // 4, 2, 2),
        )
        return nn.Sequential(OrderedDict(layers)), dim // 4
    if stride == 8:
        return nn.ConvTranspose2d(dim, dim // 2, 2, 2), dim // 2
    # an odd feature map rounds up, as a pyramid of strided convolutions and the anchors of the heads do
    return (nn.Identity() if stride == 16 else nn.MaxPool2d(2, 2, ceil_mode=True)), dim


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """The simple feature pyramid of ViTDet (Li et al. 2022, Fig. 2): parallel branches from the last feature map of
    a plain backbone to strides 4, 8, 16 and 32.

    Args:
        in_channels (int): Channels of the feature map of stride 16, a multiple of 4.
        out_channels (int): Channels of all outputs.
        num_outs (int): 4, or 5 to add a feature map of stride 64 for the RPN: every second position of the last one.
        init_cfg (dict, optional): MMEngine's initialisation. None takes uniform Xavier for convolutions, as
            MMDetection's FPN.

    Raises:
        ValueError: For ``num_outs`` other than 4 and 5, an ``in_channels`` that is no multiple of 4, or a feature map
            with another number of channels.

    Shape: one map (B, in_channels, h, w) of stride 16, or the last of a sequence -> ``num_outs`` maps of
    ``out_channels`` channels. Their sizes: (4h, 4w), (2h, 2w), (h, w), (ceil(h / 2), ceil(w / 2)),
    (ceil(h / 4), ceil(w / 4)).

    Examples:
        >>> import torch
        >>> neck = SimpleFeaturePyramid(192).eval()
        >>> [tuple(out.shape[2:]) for out in neck(torch.rand(1, 192, 5, 6))]
        [(20, 24), (10, 12), (5, 6), (3, 3), (2, 2)]
    """

    def __init__(
        self, in_channels: int, out_channels: int = 256, num_outs: int = 5, init_cfg: Optional[dict] = None
    ) -> None:
        super().__init__(init_cfg or dict(type='Xavier', layer='Conv2d', distribution='uniform'))
        if num_outs not in (4, 5):
            raise ValueError(f'num_outs={num_outs}: expected 4 or 5')
        if type(in_channels) is not int or in_channels < 4 or in_channels % 4:
            raise ValueError(f'in_channels={in_channels}: expected a multiple of 4')
        self.in_channels = in_channels
        self.num_outs = num_outs
        self.levels = ModuleList()
        for stride in STRIDES:
            scale, width = resample(in_channels, stride)
            # layers have names, since recipes exempt keys that contain 'norm' from weight decay
            layers = dict(
                scale=scale,
                lateral=nn.Conv2d(width, out_channels, 1, bias=False),
                norm1=MapLayerNorm(out_channels, eps=1e-6),
                smooth=nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                norm2=MapLayerNorm(out_channels, eps=1e-6),
            )
            self.levels.append(nn.Sequential(OrderedDict(layers)))

    def forward(self, feats: Union[Tensor, Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Return the feature maps of all levels, finest first.

        Images that are no multiple of 16 leave padding in the levels; MMDetection's configs pad to multiples of 32.

        Args:
            feats (Tensor | Sequence[Tensor]): The feature map of stride 16, or a sequence that ends in it.

        Raises:
            ValueError: For a feature map with other channels than ``in_channels``.
        """
        x = feats if isinstance(feats, Tensor) else feats[-1]
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'feats: the map has the shape {tuple(x.shape)}; '
                f'in_channels={self.in_channels} allows (B, {self.in_channels}, H, W)'
            )
        outs = [level(x) for level in self.levels]
        if self.num_outs == 5:
            outs.append(F.max_pool2d(outs[-1], 1, stride=2))
        return tuple(outs)
