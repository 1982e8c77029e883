# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .block import Block
from .compact import FactorisedLinear, build_ffn, compact
from .ffn import MLP, ConvFFN, DWConvFFN
from .patch_embed import ConvDownsample, ConvStem, PatchEmbed, PatchMerging
from .position import PositionTable, ResidualDWConv, rotary_table

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
    'build_ffn',
    'compact',
    'rotary_table',
]
