# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

from torch import Tensor

from .. import ops
from .mixer import TOKEN_MIXERS, TokenMixer


@TOKEN_MIXERS.register_module('enhanced')
class EnhancedMixer(TokenMixer):
    """Enhanced linear attention of EfficientViT (Cai et al. 2022, Sec. 3.2): linear attention with the ReLU kernel.

    The enhancement is the depth-wise 3x3 convolution in the feed-forward network, ``ffn='dwconv'`` in the arch.
    """

    def forward(self, q, k, v, grid, key_grid, mask=None, **_) -> Tensor:
        return ops.linear_attention(q, k, v, self.num_heads, kernel='relu', mask=mask)
