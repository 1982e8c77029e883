# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Blocks of Next-ViT: convolutions with batch norms, convolutional attention, attention with averaged keys."""

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..attention import ReducedKeysAttention, StageContext
from ..layers import MLP, build_map_norm
from ..ops import chain
from ..ops.leaves import Conv2d, Linear
from ..ops.maps import mean_pool, sequence_mean
from ..ops.tokens import from_image, to_image

SHARE = 0.75  # share of the attention in a transformer block's channels and stochastic depth rate


def norm_map(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a batch norm to a (B, H, W, C) feature map."""
    return norm(to_image(x)).permute(0, 2, 3, 1)


class ConvNorm(BaseModule):
    """Convolution without bias, batch norm and, with ``relu``, ReLU: (B, H, W, C) -> (B, ceil(H / s), ceil(W / s), C').

    Args:
        in_dim, dim (int): Channels C and C'.
        norm_cfg (dict): The norm.
        kernel_size (int): Odd.
        stride, groups (int): Of the convolution.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        norm_cfg: dict,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        relu: bool = False,
    ) -> None:
        super().__init__()
        self.conv = Conv2d(in_dim, dim, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
        self.norm = build_map_norm(norm_cfg, dim)
        self.in_dim, self.relu = in_dim, relu

    def forward(self, x: Tensor) -> Tensor:
        x = from_image(chain(to_image(x), self.conv, self.norm))
        return F.relu(x) if self.relu else x


class PooledEmbed(ConvNorm):
    """2x2 average pooling, then a :class:`ConvNorm` of 1x1: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), C').

    A partial patch at an odd border averages the pixels that it has.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(mean_pool(x, 2, self.in_dim).permute(0, 2, 3, 1))


class ConvAttention(BaseModule):
    """Multi-head convolutional attention (Next-ViT Eq. 2): 3x3 convolution in groups, batch norm, ReLU, linear.

    Args:
        dim (int): Channels C, a multiple of ``group_dim``.
        group_dim (int): Channels of a group, the "head" of the convolution.
        norm_cfg (dict): Config of the batch norm.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int, group_dim: int, norm_cfg: dict) -> None:
        super().__init__()
        self.conv = ConvNorm(dim, dim, norm_cfg, 3, groups=dim // group_dim, relu=True)
        self.proj = Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.conv(x))


class ReLUMLP(MLP):
    """Feed-forward network with ReLU instead of GELU: linear, ReLU, linear. Arguments as
    :class:`~mmlinattn.layers.MLP`."""

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, self.fc1, F.relu, self.fc2)


class AveragedKeysAttention(ReducedKeysAttention):
    """Global attention with keys and values projected from averages of tokens, after a batch norm (Next-ViT Eq. 5).

    Args:
        dim, num_heads, mixer, kwargs: See :class:`~mmlinattn.attention.Attention`; without ``local_kernel``.
        ratio (int): Reduction r of height and width.
        reduction (str): ``'grid'`` averages patches of r x r tokens; a partial patch at the border averages the tokens
            that it has. ``'sequence'``, as in the released code, averages r^2 consecutive tokens of the flattened map.
            It mixes rows, leaves the keys without a grid, drops the remaining tokens, and needs a map of at least r^2
            tokens.
        norm_cfg (dict): Norm of the averages.
    """

    def __init__(self, dim: int, num_heads: int, mixer, ratio: int, reduction: str, norm_cfg: dict, **kwargs) -> None:
        super().__init__(dim, num_heads, mixer, **kwargs)
        self.ratio = ratio
        self.reduction = reduction
        self.norm = build_map_norm(norm_cfg, dim)

    def reduce(self, x: Tensor) -> Tensor:
        """Average the feature map for keys and values: (B, H, W, C) -> (B, h, w, C), with h = 1 for ``'sequence'``."""
        dim, ratio = self.mixer.dim, self.ratio
        mean = mean_pool(x, ratio, dim) if self.reduction == 'grid' else sequence_mean(x, ratio**2, dim)
        return self.norm(mean).permute(0, 2, 3, 1)


class ConvBlock(BaseModule):
    """Next convolution block: ``x + ConvAttention(x)``, then ``x + FFN(BN(x))``; (B, H, W, in_dim) -> (B, H, W, C).

    Args:
        in_dim (int): Channels of the input.
        dim (int): Channels C of the block; if it differs from ``in_dim``, a 1x1 convolution comes first.
        group_dim (int): See :class:`ConvAttention`.
        ffn (nn.Module): Feed-forward network on (B, H, W, C) feature maps.
        norm_cfg (dict): Config of all norms.
        drop_path (float): Rate of stochastic depth.
    """

    def __init__(self, in_dim: int, dim: int, group_dim: int, ffn: nn.Module, norm_cfg: dict, drop_path: float) -> None:
        super().__init__()
        self.embed = ConvNorm(in_dim, dim, norm_cfg) if in_dim != dim else None
        self.conv = ConvAttention(dim, group_dim, norm_cfg)
        self.norm = build_map_norm(norm_cfg, dim)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + self.drop_path(self.conv(x))
        return x + self.drop_path(self.ffn(norm_map(self.norm, x)))


class TransformerBlock(BaseModule):
    """Next transformer block (Next-ViT Eq. 6): attention on three quarters of the channels, a convolution on the rest.

    ``a = x + Attention(BN(x)); y = Conv1x1(a); c = y + ConvAttention(y); z = concat(a, c); out = z + FFN(BN(z))``.

    Args:
        in_dim (int): Channels of the input, (B, H, W, in_dim); the result is (B, H, W, dim).
        attn (nn.Module): Attention on (B, H, W, attn_dim) feature maps.
        attn_dim (int): Channels of x and a; if it differs from ``in_dim``, a 1x1 convolution comes first.
        dim (int): Channels of the result, above ``attn_dim``.
        group_dim, ffn, norm_cfg, drop_path: See :class:`ConvBlock`.
    """

    def __init__(
        self,
        in_dim: int,
        attn: nn.Module,
        attn_dim: int,
        dim: int,
        group_dim: int,
        ffn: nn.Module,
        norm_cfg: dict,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.embed = ConvNorm(in_dim, attn_dim, norm_cfg) if in_dim != attn_dim else None
        self.norm1 = build_map_norm(norm_cfg, attn_dim)
        self.attn = attn
        self.narrow = ConvNorm(attn_dim, dim - attn_dim, norm_cfg)
        self.conv = ConvAttention(dim - attn_dim, group_dim, norm_cfg)
        self.norm2 = build_map_norm(norm_cfg, dim)
        self.ffn = ffn
        self.attn_drop_path = DropPath(drop_path * SHARE)
        self.conv_drop_path = DropPath(drop_path * (1 - SHARE))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + self.attn_drop_path(self.attn(norm_map(self.norm1, x), stage))
        y = self.narrow(x)
        y = y + self.conv_drop_path(self.conv(y))
        x = torch.cat((x, y), dim=-1)
        return x + self.drop_path(self.ffn(norm_map(self.norm2, x)))
