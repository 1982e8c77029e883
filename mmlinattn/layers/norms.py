# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Norms of tokens and feature maps."""

from mmcv.cnn import build_norm_layer
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..ops.leaves import LayerNorm


def build_map_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm of (B, C, H, W) feature maps.

    Raises:
        ValueError: For a norm over the last axis (``'LN'``).
    """
    norm = build_norm_layer(norm_cfg, dim)[1]
    if type(norm) is nn.LayerNorm:
        raise ValueError(f"norm_cfg={norm_cfg}: expected a norm of (B, C, H, W) maps, as 'BN', 'SyncBN' or 'GN'")
    return norm


def build_token_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm over the last axis, for (B, N, C) tokens or (B, H, W, C) feature maps.

    Raises:
        ValueError: For a norm over the second axis, which holds tokens or rows here instead of channels.
    """
    norm = build_norm_layer(norm_cfg, dim)[1]
    if isinstance(norm, (_NormBase, nn.GroupNorm)):
        raise ValueError(f"norm_cfg={norm_cfg}: expected a norm over the last axis, as 'LN'")
    return norm


def build_branch_norm(norm_cfg: dict, dim: int) -> nn.Module:
    """Build a norm over the last axis at the start of a residual branch; ``'LN'`` gives our :class:`LayerNorm`."""
    return build_token_norm(dict(norm_cfg, type=LayerNorm) if norm_cfg.get('type') == 'LN' else norm_cfg, dim)
