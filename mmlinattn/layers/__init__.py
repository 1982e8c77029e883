# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from ..ops import rotary_table
from ..ops.batch_norms import fold_batch_norm, is_batch_norm, is_foldable
from ..ops.leaves import Conv2d, ConvOfGELU, LayerNorm, Linear, MapLayerNorm, ResidualDWConv
from .block import MLP, Block, ConvFFN, DWConvFFN, SourceBlock, TokenBlock
from .compact import FactorisedLinear, build_ffn, compact
from .initial_weights import GroupedFanOutInit
from .norms import build_map_norm, build_token_norm
from .patch_embed import (
    ConvDownsample,
    ConvStem,
    PatchConv2d,
    PatchEmbed,
    PatchMerging,
)
from .positions import PositionTable, RelativePositionBias

__all__ = [
    'MLP',
    'Block',
    'Conv2d',
    'ConvDownsample',
    'ConvFFN',
    'ConvOfGELU',
    'ConvStem',
    'DWConvFFN',
    'FactorisedLinear',
    'GroupedFanOutInit',
    'LayerNorm',
    'Linear',
    'MapLayerNorm',
    'PatchConv2d',
    'PatchEmbed',
    'PatchMerging',
    'PositionTable',
    'RelativePositionBias',
    'ResidualDWConv',
    'SourceBlock',
    'TokenBlock',
    'build_ffn',
    'build_map_norm',
    'build_token_norm',
    'compact',
    'fold_batch_norm',
    'is_batch_norm',
    'is_foldable',
    'rotary_table',
]
