# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from ..ops import rotary_table
from .block import MLP, Block, ConvFFN, DWConvFFN, ResidualDWConv
from .compact import FactorisedLinear, build_ffn, compact
from .linear import apply_linear, project
from .patch_embed import (
    ConvDownsample,
    ConvStem,
    PatchEmbed,
    PatchMerging,
    conv_norms,
    fold_batch_norm,
    is_foldable,
    strided_conv,
)
from .position import PositionTable

__all__ = [
    'MLP',
    'Block',
    'ConvDownsample',
    'ConvFFN',
    'ConvStem',
    'DWConvFFN',
    'FactorisedLinear',
    'PatchEmbed',
    'PatchMerging',
    'PositionTable',
    'ResidualDWConv',
    'apply_linear',
    'build_ffn',
    'compact',
    'conv_norms',
    'fold_batch_norm',
    'is_foldable',
    'project',
    'rotary_table',
    'strided_conv',
]
