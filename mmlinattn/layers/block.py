# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The transformer block of all backbones, and its feed-forward networks on (B, H, W, C) feature maps."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..ops.leaves import Conv2d, Leaf, Linear, ResidualDWConv, add_scaled, chain
from ..ops.tokens import from_image, to_image, unflatten
from .norms import build_branch_norm


class Block(Leaf, BaseModule):
    """Pre-norm transformer block of all backbones.

    ``x = position(x); x = x + gamma1 * attn(norm1(x)); x = x + gamma2 * ffn(norm2(x))``, each branch under stochastic
    depth.

    Args:
        dim (int): Channels C.
        attn (nn.Module): Called with a feature map (or tokens) of C channels and the stage's context; keeps the shape.
        ffn (nn.Module): Feed-forward network on feature maps of C channels.
        norm_cfg (dict): Config of both norms, over the last axis.
        drop_path (float): Rate of stochastic depth.
        layer_scale (float, optional): Initial value of gamma; None for no layer scale.
        position (nn.Module, optional): Position encoding that includes its own residual connection.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        ffn: nn.Module,
        norm_cfg: dict,
        drop_path: float = 0.0,
        layer_scale: Optional[float] = None,
        position: Optional[nn.Module] = None,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        self.position = position
        self.norm1 = build_branch_norm(norm_cfg, dim)
        self.attn = attn
        self.norm2 = build_branch_norm(norm_cfg, dim)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        gammas = [None if layer_scale is None else nn.Parameter(torch.full((dim,), float(layer_scale))) for _ in '12']
        self.gamma1, self.gamma2 = gammas

    def forward(self, x: Tensor, stage) -> Tensor:
        position, drop_path = self.position, self.drop_path
        x = x if position is None else position(x)
        # norms get three dimensions: upstream's FLOP counters assume that four are (B, C, H, W)
        branch = self.attn(self.norm1(x.flatten(1, -2)).reshape(x.shape), stage)
        x = add_scaled(x, branch, self.gamma1, drop_path)
        branch = self.feed_forward(self.norm2(x.flatten(1, -2)).reshape(x.shape), stage)
        return add_scaled(x, branch, self.gamma2, drop_path)

    def feed_forward(self, x: Tensor, stage) -> Tensor:
        return self.ffn(x)


class SourceBlock(Block):
    """:class:`Block` that gives its input, before the norm, to mixers that need the mean token.

    It sets ``StageContext.source``. Without that, such mixers average their own input, which is normalised.
    """

    def forward(self, x: Tensor, stage) -> Tensor:
        return super().forward(x, stage._replace(source=x))


class TokenBlock(Block):
    """:class:`Block` on tokens (B, N, C) with a feed-forward network that takes maps. Each class token passes the
    network as a feature map of one pixel."""

    def feed_forward(self, x: Tensor, stage) -> Tensor:
        height, width, prefix = stage.grid[:3]
        image = self.ffn(unflatten(x[:, prefix:], 1, (height, width))).flatten(1, 2)
        if not prefix:
            return image
        class_tokens = self.ffn(x[:, :prefix].flatten(0, 1)[:, None, None])  # each a feature map of one pixel
        return torch.cat((class_tokens.reshape(x.shape[0], prefix, -1), image), dim=1)


# --- feed-forward networks --------------------------------------------------------------------------------------------


class MLP(BaseModule):
    """Feed-forward network on (B, H, W, C) feature maps or (B, N, C) tokens: linear, GELU, linear.

    Args:
        dim (int): Channels C.
        hidden_dim (int): Channels of the hidden layer.
    """

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.fc1: Any = Linear(dim, hidden_dim)
        self.fc2: Any = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, self.fc1, F.gelu, self.fc2)


class ConvFFN(MLP):
    """RAVLT's feed-forward network on (B, H, W, C): linear, GELU, ``h + DWConv3x3(h)``, linear. Arguments as
    :class:`MLP`."""

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv: Any = ResidualDWConv(hidden_dim, of_gelu=True)

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, self.fc1, self.dwconv, self.fc2)


class DWConvFFN(MLP):
    """PVTv2's feed-forward network on (B, H, W, C): linear, DWConv3x3, GELU, linear. Arguments as :class:`MLP`."""

    def __init__(self, dim: int, hidden_dim: int, init_cfg=None) -> None:
        super().__init__(dim, hidden_dim, init_cfg)
        self.dwconv: Any = Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, self.fc1, to_image, self.dwconv, F.gelu, from_image, self.fc2)
