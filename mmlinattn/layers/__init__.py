# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .block import Block, GlobalAttention
from .ffn import ConvFFN
from .patch_embed import ConvDownsample, ConvStem
from .position import ResidualDWConv, rotary_table

__all__ = ['Block', 'ConvDownsample', 'ConvFFN', 'ConvStem', 'GlobalAttention', 'ResidualDWConv', 'rotary_table']
