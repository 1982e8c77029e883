# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from torch import Tensor

from .. import ops
from ..ops.linear import check_kernel
from .mixer import TOKEN_MIXERS, TokenMixer


@TOKEN_MIXERS.register_module('rala')
class RALAMixer(TokenMixer):
    """Rank-augmented linear attention (RALA Sec. 3.2, Eq. 3-6).

    Args:
        dim (int): Channels C.
        num_heads (int): Number of heads.
        grid (tuple[int, int], optional): Not used, as the mixer stores no position table.
        augment_kv (bool): Weigh the keys by their relation to the mean query (Eq. 3, 4); False is the ablation
            "without KV augmentation" (Tab. 9).
        output_gate (str, optional): Function phi of the input that multiplies the output (Eq. 6): ``'projection'``,
            ``'identity'``, ``'tanh'``, or None for "without output augmentation" (Tab. 9, 10).
        kernel (str): kappa, ``'elu'`` (ELU + 1), ``'relu'`` or ``'softmax'`` (Tab. 10).
        scale_weights (bool): Divide the logits of the token weights by sqrt(d), as the release does and the paper not.

    Raises:
        ValueError: For an unknown ``kernel``.
    """

    gate: Optional[str] = 'projection'
    rotary = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid=None,
        augment_kv: bool = True,
        output_gate: Optional[str] = 'projection',
        kernel: str = 'elu',
        scale_weights: bool = True,
        init_cfg=None,
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        self.kernel = check_kernel(kernel, ('elu', 'relu', 'softmax'))
        self.gate = output_gate
        self.weight_scale = None
        if augment_kv:
            self.weight_scale = self.head_dim**-0.5 if scale_weights else 1.0

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, **_) -> Tensor:
        return ops.rala(
            q, k, v, self.num_heads, kernel=self.kernel, rotary=rotary, mask=mask, weight_scale=self.weight_scale
        )
