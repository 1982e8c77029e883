# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The interface of token mixers: attention operations without their projections.

A **mixer** turns projected tokens into mixed tokens. It gets ``(q, k, v)`` as ``(B, N, channels)`` tensors, the grids
of the tokens, and the mask of valid ones. It knows nothing of images, windows or the backbone.
"""

from typing import Optional, Union

import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import Registry
from torch import Tensor

from ..ops.leaves import Conv2d, shared_casts
from ..ops.tokens import Grid

TOKEN_MIXERS = Registry('token mixer', scope='mmlinattn', locations=['mmlinattn.attention'])


LEFT_TO_BACKBONE = ('backbone', 'host')  # values of ``TokenMixer.gate``; the second is a former name


class TokenMixer(BaseModule):
    """Base class of every attention: ``(q, k, v) -> mixed values``.

    Args:
        dim (int): Channels C of the tokens.
        num_heads (int): Number of heads.
        grid (tuple[int, int], optional): Height and width of the grid for which position tables are stored. Only mixers
            with ``position_table`` use it.

    Raises:
        ValueError: If ``num_heads`` does not divide ``dim``.

    Class attributes tell attention modules and backbones the needs of a mixer:

    - ``quadratic``: the cost grows with N^2, so Swin and CSWin give it small windows or stripes, PVT reduced keys.
    - ``gate``: gate of the output by the block's input: None, ``'projection'``, ``'identity'``, ``'tanh'`` (see
      :class:`~mmlinattn.attention.Attention`). ``'backbone'``, the default, leaves the choice to the backbone.
    - ``rotary``: uses the encoding ``rotary`` of :func:`mmlinattn.layers.rotary_table`.
    - ``bias``: adds ``bias`` to its attention map (relative position bias).
    - ``local_keys``: uses the spatial neighbours of a key, so shifted windows pass ``regions`` in the grid of the keys.
    - ``sequential``: depends on the order of all tokens, so windows and stripes raise for it.
    - ``context``: uses the mean input token, passed as ``context``.
    - ``position_table``: needs ``grid`` at construction.
    """

    quadratic = False
    gate: Optional[str] = 'backbone'
    rotary = False
    bias = False
    local_keys = False
    sequential = False
    context = False
    position_table = False

    def __init__(self, dim: int, num_heads: int, grid: Optional[tuple[int, int]] = None, init_cfg=None) -> None:
        super().__init__(init_cfg)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f'num_heads={num_heads}: expected a divisor of the width {dim}')
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid = grid

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of the projected q, k and v."""
        return self.dim, self.dim, self.dim

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        key_grid: Grid,
        mask: Optional[Tensor] = None,
        *,
        rotary: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
        context: Optional[Tensor] = None,
    ) -> Tensor:
        """Mix the values. Every mixer gets all keyword arguments; it names those that it uses (others: ``**_``).

        Args:
            q (Tensor): Queries, (B, N, widths[0]), before the split into heads.
            k (Tensor): Keys, (B, M, widths[1]).
            v (Tensor): Values, (B, M, widths[2]); zero for masked tokens.
            grid (Grid): The grid of the queries, ``grid.num_tokens == N``.
            key_grid (Grid): The grid of keys and values, ``key_grid.num_tokens == M``.
            mask (Tensor, optional): (B, M) bool, True for valid tokens, None when all are valid.
            rotary (Tensor, optional): (N, head_dim / 2, 2), see :func:`mmlinattn.layers.rotary_table`.
            bias (Tensor, optional): Additive, broadcastable to (B, heads, N, M).
            context (Tensor, optional): Mean input token, (B, C).

        Returns:
            Tensor: (B, N, widths[2]).
        """
        raise NotImplementedError


class LocalMixer(TokenMixer):
    """A mixer that adds a convolution of the values to its attention: ``out = attend(q, k, v) + convolve(v)``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_grid: Grid, mask: Optional[Tensor] = None) -> Tensor:
        """Compute the attention without the convolution of the values. Arguments are those of :meth:`forward`.

        Returns:
            Tensor: (B, N, C_v), with the number of channels of the values, ``widths[2]``.
        """
        raise NotImplementedError

    def convolve(self, v: Tensor, key_grid: Grid, context: Optional[Tensor] = None) -> Optional[Tensor]:
        """Convolve the values, (B, M, widths[2]); return None if the mixer is configured without a convolution.

        Some mixers predict the kernels from ``context``, the mean input token (B, C).
        """
        raise NotImplementedError

    def forward(self, q, k, v, grid, key_grid, mask=None, context=None, **_) -> Tensor:
        out, local = self.attend(q, k, v, key_grid, mask), self.convolve(v, key_grid, context)
        return out if local is None else out + local


class RepeatedConv2d(Conv2d):
    """Depth-wise convolution of (B, C, h, w) feature maps, each kernel used by several channels.

    Args:
        channels (int): Number of kernels.
        repeats (int): Channels that share a kernel, C / channels.
        kernel_size (tuple[int, int]): Odd height and width; the feature map keeps its size.
        interleaved (bool): True if channels that share a kernel are adjacent; False if they are ``channels`` apart.
        bias (bool): Add a bias.
    """

    def __init__(
        self,
        channels: int,
        repeats: int,
        kernel_size: tuple[int, int],
        interleaved: bool = False,
        bias: bool = True,
    ) -> None:
        padding = kernel_size[0] // 2, kernel_size[1] // 2
        super().__init__(channels, channels, kernel_size, padding=padding, groups=channels, bias=bias)
        self.repeats, self.interleaved = repeats, interleaved

    def repeated(self, x: Tensor) -> Tensor:
        """Repeat the weight or bias of each kernel for its channels: (channels, ...) -> (channels * repeats, ...)."""
        if self.interleaved:
            return x.repeat_interleave(self.repeats, dim=0)
        return x.repeat(self.repeats, *(1,) * (x.dim() - 1))

    def forward(self, image: Tensor) -> Tensor:
        weight, bias = shared_casts(self.weight, self.bias, image)
        weight, bias = self.repeated(weight), None if bias is None else self.repeated(bias)
        padding = self.padding
        if self.padding_mode != 'zeros':
            image, padding = F.pad(image, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        return F.conv2d(image, weight, bias, self.stride, padding, self.dilation, self.groups * self.repeats)


def get_mixer(spec: Union[str, dict]) -> tuple[type['TokenMixer'], dict]:
    """Return class and options of the mixer that an entry of ``stage_attns`` names.

    Args:
        spec (str | dict): A registered name, or ``dict(type=name, **options)``; as in MMEngine, the type may be a
            class.

    Raises:
        ValueError: For an unknown name; lists the known ones.
    """
    options = dict(spec) if isinstance(spec, dict) else dict(type=spec)
    name = options.pop('type', None)
    if isinstance(name, type) and issubclass(name, TokenMixer):
        return name, options
    mixer = TOKEN_MIXERS.module_dict.get(name)
    if mixer is None:
        raise ValueError(f'stage_attns: unknown attention {name!r}; known are {sorted(TOKEN_MIXERS.module_dict)}')
    return mixer, options


def check_local_kernel(size: Optional[int]) -> Optional[int]:
    """Return ``size``: None for no convolution, or the kernel size of one that keeps the size of its feature map.

    Raises:
        ValueError: If ``size`` is neither None nor an odd int >= 1.
    """
    if size is not None and (type(size) is not int or size < 1 or size % 2 == 0):
        raise ValueError(f'local_kernel={size!r}: expected None or an odd int >= 1')
    return size
