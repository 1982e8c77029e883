# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .block import Block
from .compact import FactorisedLinear, build_ffn, compact
from .conv_norm import conv_norms, fold_batch_norm, is_foldable
from .ffn import MLP, ConvFFN, DWConvFFN
from .linear import apply_linear, project, split_parts
from .patch_embed import ConvDownsample, ConvStem, PatchEmbed, PatchMerging, strided_conv
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
    'apply_linear',
    'build_ffn',
    'compact',
    'conv_norms',
    'fold_batch_norm',
    'is_foldable',
    'project',
    'rotary_table',
    'split_parts',
    'strided_conv',
]
