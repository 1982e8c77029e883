# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .angular import AngularMixer
from .arrangements import MapWindows, ReducedAttention, StripeAttention, WindowAttention
from .base import TOKEN_MIXERS, Attention, GlobalAttention, Grid, TokenMixer, get_mixer
from .efficient import EfficientMixer
from .enhanced import EnhancedMixer
from .focused import FocusedMixer
from .hallucinated import HallucinatedMixer
from .hydra import HydraMixer
from .inline import InLineMixer
from .rala import RALAMixer
from .softmax import SoftmaxMixer
from .windows import Windows

__all__ = [
    'TOKEN_MIXERS',
    'AngularMixer',
    'Attention',
    'MapWindows',
    'EfficientMixer',
    'EnhancedMixer',
    'FocusedMixer',
    'GlobalAttention',
    'Grid',
    'HallucinatedMixer',
    'HydraMixer',
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
