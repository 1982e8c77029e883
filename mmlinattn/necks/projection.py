# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional, Union

from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn


@MODELS.register_module()
class ConvProjectionNeck(BaseModule):
    """RAVLT's classifier without its last linear layer: 1x1 convolution, batch norm, SiLU, global average.

    It connects a backbone with ``out_norm=False`` to MMPretrain's ``LinearClsHead``.

    Args:
        in_channels (int): Channels of the feature map of the backbone's last stage.
        out_channels (int): Channels of the vector (RAVLT: 1024).
        norm_cfg (dict, optional): Norm after the convolution. None takes ``dict(type='BN')``.
        init_cfg (dict, optional): MMEngine's initialisation. None takes a truncated normal of deviation 0.02 for the
            convolution, as in the release.

    Raises:
        ValueError: For a feature map with another number of channels.

    Shape: one feature map (B, in_channels, H, W), or the last of a sequence -> tuple of one vector (B, out_channels).

    Examples:
        >>> import torch
        >>> neck = ConvProjectionNeck(512).eval()
        >>> neck((torch.rand(2, 512, 7, 7),))[0].shape
        torch.Size([2, 1024])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 1024,
        norm_cfg: Optional[dict] = None,
        init_cfg: Optional[dict] = None,
    ) -> None:
        super().__init__(init_cfg or dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0))
        self.proj = nn.Conv2d(in_channels, out_channels, 1)
        self.norm = build_norm_layer(norm_cfg or dict(type='BN'), out_channels)[1]
        self.act = nn.SiLU()

    def forward(self, feats: Union[Tensor, Sequence[Tensor]]) -> tuple[Tensor]:
        x = feats if isinstance(feats, Tensor) else feats[-1]
        if x.dim() != 4 or x.shape[1] != self.proj.in_channels:
            raise ValueError(
                f'feats: the map has the shape {tuple(x.shape)}; '
                f'in_channels={self.proj.in_channels} allows (B, {self.proj.in_channels}, H, W)'
            )
        return (self.act(self.norm(self.proj(x))).mean((2, 3)),)
