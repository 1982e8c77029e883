# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Optional

from ..layers.autocast import without_autocast
from .base import TOKEN_MIXERS, TokenMixer
from .blockwise import rala_inplace
from .functional import accumulation_dtype, kernel_map, overwrites, rala


@TOKEN_MIXERS.register_module('rala')
class RALAMixer(TokenMixer):
    """Rank-augmented linear attention (RALA Sec. 3.2, Eq. 3-6).

    Args:
        dim (int): Width C.
        num_heads (int): Number of heads.
        augment_kv (bool): Weigh the keys by their relation to the mean query (Eq. 3, 4); False is the ablation
            "without KV augmentation" (Tab. 9).
        output_gate (str, optional): phi of Eq. 6, multiplied with the output: ``'projection'``, ``'identity'``,
            ``'tanh'``, or None for "without output augmentation" (Tab. 9, 10).
        kernel (str): kappa, ``'elu'`` (ELU + 1), ``'relu'`` or ``'softmax'`` (Tab. 10).
        scale_weights (bool): Logits of the token weights are divided by sqrt(d) as in the release; the paper does not.

    Raises:
        ValueError: For an unknown ``kernel``.
    """

    gate = 'projection'
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
        if kernel not in ('elu', 'relu', 'softmax'):
            raise ValueError(f"kernel={kernel!r} has to be 'elu', 'relu' or 'softmax'")
        self.kernel = kernel
        self.gate = output_gate
        self.weight_scale = None if not augment_kv else self.head_dim**-0.5 if scale_weights else 1.0

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        if overwrites() and q.dtype == accumulation_dtype(q) == v.dtype:
            with without_autocast(q):
                return self.merge_heads(rala_inplace(q, k, v, self.kernel, rotary, mask, self.weight_scale))
        q, k = kernel_map(q, self.kernel), kernel_map(k, self.kernel)
        return self.merge_heads(rala(q, k, v, rotary, mask, self.weight_scale))
