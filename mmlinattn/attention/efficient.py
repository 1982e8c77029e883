# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

from torch import Tensor

from .. import ops
from .mixer import TOKEN_MIXERS, TokenMixer


@TOKEN_MIXERS.register_module('efficient')
class EfficientMixer(TokenMixer):
    """Efficient attention: softmax over the channels of queries and over the tokens of keys (Shen et al. 2021,
    Eq. 4-6)."""

    def forward(self, q, k, v, grid, key_grid, mask=None, **_) -> Tensor:
        return ops.efficient_attention(q, k, v, self.num_heads, mask)
