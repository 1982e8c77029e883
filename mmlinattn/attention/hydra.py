# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

from torch import Tensor

from .. import ops
from .mixer import TOKEN_MIXERS, TokenMixer


@TOKEN_MIXERS.register_module('hydra')
class HydraMixer(TokenMixer):
    """Hydra attention with as many heads as channels (Bolya et al. 2022, Eq. 5-7); ``num_heads`` has no influence."""

    def __init__(self, dim: int, num_heads: int, grid=None, init_cfg=None) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        self.num_heads, self.head_dim = dim, 1

    def forward(self, q, k, v, grid, key_grid, mask=None, **_) -> Tensor:
        return ops.hydra_attention(q, k, v, mask)
