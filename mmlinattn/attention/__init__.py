# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from .base import TOKEN_MIXERS, Attention, Grid, TokenMixer, get_mixer
from .rala import RALAMixer
from .softmax import SoftmaxMixer

__all__ = ['TOKEN_MIXERS', 'Attention', 'Grid', 'RALAMixer', 'SoftmaxMixer', 'TokenMixer', 'get_mixer']
