# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from typing import Any, Optional

from torch import Tensor

from .. import ops
from ..ops.tokens import on_grid
from .mixer import TOKEN_MIXERS, LocalMixer, RepeatedConv2d

CONVS = ('grid', 'sequence', None)


@TOKEN_MIXERS.register_module('angular')
class AngularMixer(LocalMixer):
    """Linear angular attention of Castling-ViT (You et al. 2023, Eq. 4-6) plus a depth-wise convolution of the values.

    The auxiliary softmax branch of the released training code builds N x N maps. It is left out here, as in the
    released inference code.

    Args:
        dim (int): Channels C.
        num_heads (int): Number of heads.
        form (str): ``'released'`` adds half of the token's own value, and divides outputs by their norm within the
            head. ``'paper'`` takes weights ``1/2 + q . k / pi``, divided by their sum.
        conv (str, optional): Depth-wise convolution of the values, one kernel per head without bias. ``'grid'`` is 3x3
            over the feature map. ``'sequence'`` is 9x1 over all tokens with class tokens, as in the released code, and
            does not support windows. None disables the convolution.

    Raises:
        ValueError: For an unknown ``form`` or ``conv``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid=None,
        form: str = 'released',
        conv: Optional[str] = 'grid',
        init_cfg=None,
    ) -> None:
        super().__init__(dim, num_heads, grid, init_cfg)
        if form not in ('released', 'paper'):
            raise ValueError(f"form={form!r}: expected 'released' or 'paper'")
        if conv not in CONVS:
            raise ValueError(f'conv={conv!r}: expected one of {CONVS}')
        self.form, self.conv, self.sequential = form, conv, conv == 'sequence'
        self.dconv: Any = None
        if conv is not None:
            kernel = dict(grid=(3, 3), sequence=(9, 1))[conv]
            self.dconv = RepeatedConv2d(num_heads, self.head_dim, kernel, interleaved=True, bias=False)

    def attend(self, q, k, v, key_grid, mask=None) -> Tensor:
        return ops.angular_attention(q, k, v, self.num_heads, mask, self.form == 'released')

    def convolve(self, v, key_grid, context=None):
        if self.conv == 'grid':
            return on_grid(self.dconv, v, key_grid)
        return None if self.conv is None else self.dconv(v.transpose(1, 2).unsqueeze(-1))[..., 0].transpose(1, 2)
