# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The attention modules around a token mixer: projections, the depth-wise convolution of the values, the gate.

Subclasses call the mixer on whole maps, windows, stripes, or with spatially reduced keys, for any kind of mixer.
"""

from typing import Any, Optional, Union

import torch
from mmengine.model import BaseModule
from torch import Tensor

from ..ops.leaves import Conv2d, Linear, split_linear
from ..ops.tokens import Grid, on_grid, token_mean
from .context import StageContext
from .mixer import LEFT_TO_BACKBONE, check_local_kernel, get_mixer

GATES = (None, 'projection', 'identity', 'tanh')


class LePEMixer(BaseModule):
    """Token mixer with locally-enhanced position encoding (LePE), a depth-wise convolution of the values (CSWin Eq. 7).

    Args:
        dim (int): Channels C of the tokens.
        num_heads (int): Number of heads.
        mixer (str | dict): The attention, see :func:`get_mixer`.
        grid (tuple[int, int], optional): Height and width of the grid for which position tables are stored.
        local_kernel (int, optional): Size of the convolution, odd; None for none.

    Raises:
        ValueError: For an unknown ``mixer``, and a ``local_kernel`` that is even or no int.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mixer: Union[str, dict],
        grid: Optional[tuple[int, int]] = None,
        local_kernel: Optional[int] = None,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        mixer_type, options = get_mixer(mixer)
        self.mixer = mixer_type(dim, num_heads, grid=grid, **options)
        self.local: Any = None
        if check_local_kernel(local_kernel):
            width, size = self.mixer.widths[2], local_kernel
            self.local = Conv2d(width, width, size, padding=size // 2, groups=width)  # type: ignore[operator,arg-type]

    def mix(self, q, k, v, grid, key_grid=None, mask=None, rotary=None, bias=None, context=None) -> Tensor:
        """Return the mixer's output plus the convolution of the values, (B, N, widths[2]).

        Arguments as in :meth:`TokenMixer.forward`. The caller sets values of padded tokens to zero.
        """
        mixer, local = self.mixer, self.local
        out = mixer(
            q,
            k,
            v,
            grid,
            key_grid or grid,
            mask=mask,
            rotary=rotary if mixer.rotary else None,
            bias=bias if mixer.bias else None,
            context=context,
        )
        return out if local is None else out + on_grid(local, v, grid)


class Attention(LePEMixer):
    """Projections around a token mixer: ``out = W_o((mix(q, k, v) + DWConv(v)) * gate)``.

    Args:
        dim, num_heads, mixer, grid, local_kernel: See :class:`LePEMixer`.
        gate (str, optional): Gate for mixers whose own ``gate`` is ``'backbone'``, the default: ``'projection'``
            multiplies the output by a linear projection of the input (RALA Eq. 6), ``'identity'`` by the input,
            ``'tanh'`` by its tanh. None is no gate.
        qkv_bias (bool): Bias of the input projection.

    Raises:
        ValueError: For another ``gate``, or for ``'identity'`` or ``'tanh'`` if the mixer's values are not C wide.
    """

    qkv: Any

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mixer: Union[str, dict],
        grid: Optional[tuple[int, int]] = None,
        local_kernel: Optional[int] = None,
        gate: Optional[str] = None,
        qkv_bias: bool = True,
        init_cfg=None,
    ) -> None:
        super().__init__(dim, num_heads, mixer, grid, local_kernel, init_cfg)
        self.gate = gate if self.mixer.gate in LEFT_TO_BACKBONE else self.mixer.gate
        if self.gate not in GATES:
            raise ValueError(f"gate={self.gate!r}: expected None, 'projection', 'identity' or 'tanh'")
        if self.gate in ('identity', 'tanh') and self.mixer.widths[2] != dim:
            raise ValueError(f'gate={self.gate!r} multiplies by the input, {dim} wide, and {mixer!r} gives others')
        self.widths = (*self.mixer.widths, self.mixer.widths[2]) if self.gate == 'projection' else self.mixer.widths
        self.build_projections(dim, qkv_bias)
        self.proj = Linear(self.widths[2], dim)

    def build_projections(self, dim: int, bias: bool) -> None:
        """Build one linear layer, so one matmul, for queries, keys, values and the projected gate."""
        self.qkv = Linear(dim, sum(self.widths), bias=bias)

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        """Project tokens to queries, keys and values, mix them, apply the gate and project the result.

        Args:
            x (Tensor): Tokens, (B, N, C).
            stage (StageContext): Grid of the tokens, and the rotary encoding if there is one.

        Returns:
            Tensor: (B, N, C).
        """
        q, k, v, *gate = split_linear(x, self.qkv, self.widths)
        context = mean_token(source_tokens(x, stage)) if self.mixer.context else None
        out = self.mix(q, k, v, stage.grid, rotary=stage.rotary, context=context)
        out = self.apply_gate(out, x, gate)
        del q, k, v, gate  # their memory is free for the result
        return self.proj(out)

    def apply_gate(self, out: Tensor, x: Tensor, projected: list) -> Tensor:
        """Multiply ``out`` by the gate: the gate projection in ``projected``, ``x`` or ``tanh(x)``, by :attr:`gate`.

        Without a gate, ``out`` is returned as it is.
        """
        if self.gate is None:
            return out
        if projected:
            return out * projected[0]
        return out * (x if self.gate == 'identity' else x.tanh())


class GlobalAttention(Attention):
    """:class:`Attention` over a whole feature map, (B, H, W, C) -> (B, H, W, C)."""

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        return super().forward(x.flatten(1, 2), stage).reshape(x.shape)


class ReducedKeysAttention(Attention):
    """Attention over a whole map with keys and values of a smaller map, made by :meth:`reduce` of a subclass.

    Queries (and the gate) are projected by ``q``, keys and values by ``kv``. On loading, the joint ``qkv`` of a
    checkpoint is split into these.
    """

    def build_projections(self, dim: int, bias: bool) -> None:
        q, k, v, *gate = self.widths
        self.q = Linear(dim, q + sum(gate), bias=bias)
        self.kv = Linear(dim, k + v, bias=bias)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the smaller feature map for keys and values: (B, H, W, C) -> (B, h, w, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        """Attend from all tokens of a feature map to those of its reduced one: (B, H, W, C) -> (B, H, W, C)."""
        reduced, tokens = self.reduce(x), x.flatten(1, 2)
        q, *gate = self.q(tokens).split((self.widths[0], *self.widths[3:]), dim=-1)
        k, v = self.kv(reduced.flatten(1, 2)).split(self.widths[1:3], dim=-1)
        context = mean_token(source_tokens(tokens, stage)) if self.mixer.context else None
        key_grid = Grid(*reduced.shape[1:3])
        out = self.mix(q, k, v, stage.grid, key_grid, context=context)
        return self.proj(self.apply_gate(out, tokens, gate)).reshape(x.shape)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Split the joint ``qkv`` of a checkpoint into ``q`` (with the gate) and ``kv``, and load."""
        q, k, v, *gate = self.widths
        for kind in ('weight', 'bias'):
            whole = state_dict.get(f'{prefix}qkv.{kind}')
            if whole is not None and len(whole) == sum(self.widths):
                parts = whole.split([q, k + v, *gate])
                state_dict[f'{prefix}q.{kind}'] = torch.cat((parts[0], *parts[2:]))
                state_dict[f'{prefix}kv.{kind}'] = parts[1]
                del state_dict[f'{prefix}qkv.{kind}']
        super()._load_from_state_dict(state_dict, prefix, *args)


def source_tokens(x: Tensor, stage: StageContext) -> Tensor:
    """Return the tokens (B, N, C) to average for a mixer that takes the mean input token (``TokenMixer.context``).

    A block may set ``stage.source`` to its input before the norm. By default these are ``x``, the input of the
    attention.
    """
    return x if stage.source is None else stage.source.flatten(1, -2)


def mean_token(x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """Average the valid tokens of each image, accumulated in float32 or better.

    Args:
        x (Tensor): Tokens, (B, N, C); padded tokens have to be zero.
        mask (Tensor, optional): (B, N) bool, True for valid tokens. None counts all tokens.

    Returns:
        Tensor: (B, C), in the dtype of ``x``.
    """
    return token_mean(x.unsqueeze(1), mask, zero_padded=True).flatten(1).to(x.dtype)
