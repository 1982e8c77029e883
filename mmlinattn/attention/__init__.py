# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .arrangements import Cuts, GlobalAttention, ReducedAttention, StripeAttention, WindowAttention
from .base import TOKEN_MIXERS, Attention, TokenMixer, get_mixer
from .focused import FocusedMixer
from .grid import Grid
from .inline import InLineMixer
from .rala import RALAMixer
from .softmax import SoftmaxMixer
from .windows import Windows

__all__ = [
    'TOKEN_MIXERS',
    'Attention',
    'Cuts',
    'FocusedMixer',
    'GlobalAttention',
    'Grid',
    'InLineMixer',
    'RALAMixer',
    'ReducedAttention',
    'SoftmaxMixer',
    'StripeAttention',
    'TokenMixer',
    'WindowAttention',
    'Windows',
    'get_mixer',
]
