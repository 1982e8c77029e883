# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Norms of tokens and maps, and folding of batch norms into convolutions."""

from typing import Optional

from mmcv.cnn import build_norm_layer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from typing_extensions import TypeGuard

from ..ops.dtypes import accumulation_dtype
from ..utils.private_apis import is_altered


def build_map_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm of (B, C, H, W) maps.

    Raises:
        ValueError: For a norm over the last axis (``'LN'``).
    """
    norm = build_norm_layer(norm_cfg, dim)[1]
    if type(norm) is nn.LayerNorm:
        raise ValueError(f"norm_cfg={norm_cfg}: expected a norm of (B, C, H, W) maps, as 'BN', 'SyncBN' or 'GN'")
    return norm


def build_token_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm over the last axis, for (B, N, C) tokens or (B, H, W, C) maps.

    Raises:
        ValueError: For a norm over the second axis, which holds tokens or rows here instead of channels.
    """
    norm = build_norm_layer(norm_cfg, dim)[1]
    if isinstance(norm, (_NormBase, nn.GroupNorm)):
        raise ValueError(f"norm_cfg={norm_cfg}: expected a norm over the last axis, as 'LN'")
    return norm


class MapLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, C, H, W) maps, the layout in which tools expect a backbone's last norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def is_batch_norm(module: nn.Module) -> bool:
    """Return True for a batch norm, including MMCV's ``MMSyncBN`` that does not subclass PyTorch's ``_BatchNorm``."""
    return isinstance(module, _BatchNorm) or type(module).__name__ == 'SyncBatchNorm'


def is_foldable(norm: Optional[nn.Module]) -> TypeGuard[_BatchNorm]:
    """Return True if a norm can be folded into the layer before it: an unaltered batch norm with running statistics,
    weight and bias."""
    if not isinstance(norm, _BatchNorm) or is_altered(norm):
        return False
    if norm.running_var is None or norm.weight is None or norm.bias is None:
        return False
    return type(norm).forward in (_BatchNorm.forward, SyncBatchNorm.forward)


def fold_batch_norm(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution that equals ``conv`` followed by ``norm`` in eval mode."""
    wide = accumulation_dtype(conv.weight)
    assert norm.running_mean is not None and norm.running_var is not None  # see is_foldable
    scale = (norm.weight.to(wide) / (norm.running_var.to(wide) + norm.eps).sqrt()).to(wide)
    bias = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    weight, bias = conv.weight * scale[:, None, None, None], bias * scale + norm.bias
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)
