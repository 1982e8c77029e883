# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

from torch import Tensor

from .. import ops
from .mixer import TOKEN_MIXERS, TokenMixer


@TOKEN_MIXERS.register_module('softmax')
class SoftmaxMixer(TokenMixer):
    """Scaled dot-product attention, ``softmax(q k^T / sqrt(d)) v``, by PyTorch's fused kernels.

    Source: Vaswani et al. 2017, Eq. 1; the baseline of all four papers and stages 3-4 of the released RAVLT.
    """

    quadratic = True
    rotary = True
    bias = True

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, **_) -> Tensor:
        return ops.softmax_attention(q, k, v, self.num_heads, rotary, mask, bias)
