# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from .. import ops
from .mixer import TOKEN_MIXERS, TokenMixer

STEPS = ('ihh', 'chh')


@TOKEN_MIXERS.register_module('hallucinated')
class HallucinatedMixer(TokenMixer):
    """Hallucinated multi-head self-attention, hMHSA (Xu et al. 2023, Eq. 2); no N x N map is built.

    The mixer has ``2 * num_heads`` heads, half as wide as the backbone's. Queries and keys exist for the first half of
    the heads. Their maps give the maps of the other half, before the softmax, by

    - IHH (intra-head hallucination): a 3x3 convolution of each map over the grid of the keys, one kernel a head;
    - CHH (cross-head hallucination): a 1x1 convolution over the heads.

    Args:
        dim (int): Channels C, a multiple of ``2 * num_heads``.
        num_heads (int): Heads of the backbone.
        grid (tuple[int, int], optional): Not used, as the mixer stores no position table.
        steps (Sequence[str]): Order of the steps: ``('ihh', 'chh')`` is the published form. Its ablations (Tab. 2, 3)
            are ``('ihh',)``, ``('chh',)``, ``('chh', 'ihh')`` and ``()`` (copies of the computed maps).

    Raises:
        ValueError: For heads with an odd number of channels, or other ``steps``.
    """

    quadratic = True
    bias = True
    local_keys = True

    def __init__(
        self, dim: int, num_heads: int, grid=None, steps: Sequence[str] = STEPS, init_cfg: Optional[dict] = None
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        if self.head_dim % 2:
            raise ValueError(
                f'num_heads={num_heads}: hallucinated attention halves the width of a head, {self.head_dim}: expected '
                f'an even one'
            )
        self.num_heads, self.head_dim = 2 * num_heads, self.head_dim // 2
        known = isinstance(steps, (list, tuple)) and all(step in STEPS for step in steps)
        if not known or len(set(steps)) != len(steps):
            raise ValueError(f"steps={steps!r}: expected some of 'ihh' and 'chh', each once at most, in any order")
        self.steps = tuple(steps)
        self.ihh = nn.Conv2d(num_heads, num_heads, 3, padding=1, groups=num_heads) if 'ihh' in steps else None
        # no bias before IHH: its convolution over zero padding would differ between keys, and softmax not cancel it
        self.chh_first = self.steps == ('chh', 'ihh')
        self.chh = nn.Conv2d(num_heads, num_heads, 1, bias=not self.chh_first) if 'chh' in steps else None

    @property
    def widths(self) -> tuple[int, int, int]:
        return self.dim // 2, self.dim // 2, self.dim

    def forward(self, q, k, v, grid, key_grid, mask=None, bias=None, **_) -> Tensor:
        steps = self.ihh, self.chh, self.chh_first
        return ops.hallucinated_attention(q, k, v, self.num_heads, key_grid, *steps, mask, bias)
