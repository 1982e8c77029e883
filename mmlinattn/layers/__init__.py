# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .block import Block
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
    'PatchEmbed',
    'PatchMerging',
    'PositionTable',
    'ResidualDWConv',
    'rotary_table',
]
