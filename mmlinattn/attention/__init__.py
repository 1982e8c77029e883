# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from ..ops.tokens import Grid
from ..ops.windows import Windows
from .angular import AngularMixer
from .arrangements import ReducedAttention, StripeAttention, WindowAttention
from .base import Attention, GlobalAttention, ReducedKeysAttention
from .context import MapWindows, StageContext
from .efficient import EfficientMixer
from .enhanced import EnhancedMixer
from .focused import FocusedMixer
from .hallucinated import HallucinatedMixer
from .hydra import HydraMixer
from .inline import InLineMixer
from .mixer import TOKEN_MIXERS, LocalMixer, TokenMixer, get_mixer
from .rala import RALAMixer
from .softmax import SoftmaxMixer

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
    'LocalMixer',
    'RALAMixer',
    'ReducedAttention',
    'ReducedKeysAttention',
    'SoftmaxMixer',
    'StageContext',
    'StripeAttention',
    'TokenMixer',
    'WindowAttention',
    'Windows',
    'get_mixer',
]
