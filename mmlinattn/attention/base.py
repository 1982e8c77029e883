# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The interface between token mixers and hosts.

A **mixer** turns projected tokens into mixed tokens. It never sees an image, a window or a host: it gets
``(q, k, v)`` as ``(B, N, width)`` tensors, the grids the tokens live on, and which of them are real.
:class:`Attention` owns everything that is the same for all mixers: the projections, the gate, the
depth-wise term on the values, masking and the output projection. Hosts arrange tokens (whole maps, windows, stripes,
reduced keys, a class token) around an :class:`Attention` and name no method.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import Registry
from torch import Tensor, nn

from .. import ops
from ..layers.linear import Projected, apply_linear, call, has_hooks, project
from ..ops.dispatch import accumulation_dtype
from ..ops.tensors import multiply, split, to_image

TOKEN_MIXERS = Registry('token mixer', scope='mmlinattn', locations=['mmlinattn.attention'])


class Grid(NamedTuple):
    """Where a sequence of tokens lives: ``prefix`` class tokens, then ``height * width`` patch tokens, row by row.

    ``within``: height and width of the window whose top left part this grid is. Windows at the right and lower border
    of a map end where the map does; position tables are those of the whole window. In graphs that leave
    sizes open, it is the grid that goes beyond, with padding; ``within`` is what tables are resized to either way.
    ``regions``: (windows, N), below 4, for the windows of a rolled map: tokens of different regions are no neighbours.
    """

    height: int
    width: int
    prefix: int = 0
    within: Optional[tuple[int, int]] = None
    regions: Optional[Tensor] = None

    @property
    def num_tokens(self) -> int:
        return self.prefix + self.height * self.width


class TokenMixer(BaseModule):
    """Base class of every attention: ``(q, k, v) -> mixed values``.

    Args:
        dim (int): Width C of the tokens.
        num_heads (int): Number of heads; has to divide ``dim``.
        grid (tuple[int, int], optional): The grid (height, width) that tables over token positions are stored for.
            Only mixers with ``position_table`` read it.

    Class attributes describe what a mixer wants from its surroundings:

    - ``quadratic``: the cost grows with N^2, so a windowed host gives it small windows and shifts them.
    - ``gate``: how the output is gated by the block's input: None, ``'projection'``, ``'identity'`` or ``'tanh'``
      (see :class:`Attention`).
    - ``rotary``: understands ``rotary``, the encoding of :func:`mmlinattn.layers.rotary_table`.
    - ``bias``: understands an additive ``bias`` on its attention map (relative position bias).
    - ``local_keys``: looks at the neighbours of a key, so that it needs ``regions`` of its grid.
    - ``sequential``: reads the tokens in their order, which windows and stripes do not keep.
    - ``context``: wants the mean input token.
    - ``position_table``: needs ``grid`` at construction.
    - ``unit_output``: divides the output of each token by its norm within the head. :meth:`weights` leave that out:
      they call :meth:`forward` with this attribute set to False.
    - ``normalised``: the weights of each query are divided by their sum (RALA: by what it is without ``rotary``).
    """

    quadratic = False
    gate: Optional[str] = None
    rotary = False
    bias = False
    local_keys = False
    sequential = False
    context = False
    position_table = False
    unit_output = False
    normalised = True

    def __init__(self, dim: int, num_heads: int, grid: Optional[tuple[int, int]] = None, init_cfg=None) -> None:
        super().__init__(init_cfg)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f'num_heads={num_heads} has to divide the width {dim}')
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.grid = grid

    @property
    def widths(self) -> tuple[int, int, int]:
        """Projection widths (q, k, v) the mixer wants."""
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
        """Mix the values. A mixer names the terms that it understands; the others come all the same, as ``**_``.

        In inference, ``q`` and ``k`` are scratch memory of the mixer, ``v`` is not, and the result may be written over.

        Args:
            q (Tensor): Queries, (B, N, widths[0]), before the split into heads.
            k (Tensor): Keys, (B, M, widths[1]).
            v (Tensor): Values, (B, M, widths[2]); zero where ``mask`` is False.
            grid (Grid): The grid of the queries, ``grid.num_tokens == N``.
            key_grid (Grid): The grid of keys and values, ``key_grid.num_tokens == M``.
            mask (Tensor, optional): (B, M) bool, True for real tokens, None when all are real.
            rotary (Tensor, optional): (N, head_dim / 2, 2), see :func:`mmlinattn.layers.rotary_table`.
            bias (Tensor, optional): Additive, broadcastable to (B, heads, N, M).
            context (Tensor, optional): Mean input token, (B, C), or what :meth:`prepare` made of it.

        Returns:
            Tensor: (B, N, widths[2]).
        """
        raise NotImplementedError

    def prepare(self, context: Tensor) -> Tensor:
        """What the mixer predicts from mean input tokens (B, C), for all windows of a map at once. :meth:`forward` and
        :meth:`local_kernels` take it in place of the tokens."""
        return context

    def local_kernels(self, context: Optional[Tensor] = None) -> Optional[Tensor]:
        """Kernels (B or 1, widths[2], k, k) of the depth-wise convolution of the values that the mixer adds, None if it
        adds none; (B or 1, widths[2], k, 1) goes over the sequence of all tokens."""
        return None

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        grid: Grid,
        key_grid: Grid,
        mask: Optional[Tensor] = None,
        rotary: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,
        rows: Optional[Union[Sequence[int], Tensor]] = None,
    ) -> Tensor:
        """The attention map that the mixer amounts to, for looking inside: O(N M) memory, never used in a forward pass.

        ``weights @ v``, head by head, is what :meth:`forward` gives without :meth:`local_kernels`; normalisers and
        signs are part of it. It is the derivative of the output by the values, one backward pass for as many queries as
        a head has channels.

        Args:
            q, k, grid, key_grid, mask, rotary, bias: As in :meth:`forward`; nothing is overwritten.
            rows (Sequence[int] | Tensor, optional): The queries wanted, all by default. Ask for a few at a time where
                N is large.

        Returns:
            Tensor: (B, heads, N or len(rows), M), in float32 or better; zero at masked keys.

        Raises:
            ValueError: For ``rows`` out of range.
            NotImplementedError: For a mixer that is no such map.
        """
        from ..tooling.analysis.weights import mixer_weights  # the only door to what looks inside

        return mixer_weights(self, q, k, grid, key_grid, mask, rotary, bias, rows)


def get_mixer(spec: Union[str, dict]) -> tuple[type['TokenMixer'], dict]:
    """Class and options of an attention named as in ``stage_attns``.

    Args:
        spec (str | dict): A registered name, or ``dict(type=name, **options)``; as in MMEngine, a class may stand for
            its name in the dict.

    Raises:
        ValueError: For an unknown name; lists the known ones.
    """
    options = dict(type=spec) if isinstance(spec, str) else dict(spec)
    name = options.pop('type', None)
    if isinstance(name, type) and issubclass(name, TokenMixer):
        return name, options
    mixer = TOKEN_MIXERS.module_dict.get(name)
    if mixer is None:
        raise ValueError(f'stage_attns: unknown attention {name!r}; known are {sorted(TOKEN_MIXERS.module_dict)}')
    return mixer, options


class Mixing(BaseModule):
    """A token mixer and the depth-wise convolution of the values that is added to what it gives.

    Args:
        dim (int): Width C of the tokens.
        num_heads (int): Number of heads.
        mixer (str | dict): The attention, see :func:`get_mixer`.
        grid (tuple[int, int], optional): Trained grid of position tables.
        local_kernel (int, optional): Size of the convolution, odd; None for none.

    Raises:
        ValueError: For another ``local_kernel``.
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
        self.local = None
        if local_kernel is not None and check_local_kernel(local_kernel):
            v_dim = self.mixer.widths[2]
            self.local = DepthwiseConv2d(v_dim, local_kernel)

    def mix(self, q, k, v, grid, key_grid=None, mask=None, rotary=None, bias=None, context=None) -> Tensor:
        """Mixed values, (B, N, widths[2]); arguments as in :meth:`TokenMixer.forward`, values of padding zero."""
        terms = dict(
            mask=mask,
            rotary=rotary if self.mixer.rotary else None,
            bias=bias if self.mixer.bias else None,
            context=context,
        )
        out = call(self.mixer, q, k, v, grid, key_grid or grid, **terms)
        return out if self.local is None else add_local(out, v, self.local, grid, has_hooks(self.local))


class Attention(Mixing):
    """Projections around a token mixer: ``out = W_o((mix(q, k, v) + DWConv(v)) * gate)``.

    Args:
        dim, num_heads, mixer, grid, local_kernel: See :class:`Mixing`.
        gate (str, optional): Gate for a mixer that has no opinion of its own: ``'projection'`` multiplies the output
            with a linear projection of the input (RALA Eq. 6), ``'identity'`` with the input, ``'tanh'`` with its tanh.
        qkv_bias (bool): Bias of the input projection.
    """

    adds_residual = True  # forward takes a ``residual``, see :class:`~mmlinattn.layers.Block`

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
        self.gate = gate if type(self.mixer).gate is None else self.mixer.gate
        if self.gate not in (None, 'projection', 'identity', 'tanh'):
            raise ValueError(f"gate={self.gate!r} has to be None, 'projection', 'identity' or 'tanh'")
        self.widths = (*self.mixer.widths, dim) if self.gate == 'projection' else self.mixer.widths
        # one matrix for all: a single pass over the tokens where queries and keys come from the same ones
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias)
        self.proj = nn.Linear(self.widths[2], dim)

    def project(self, x: Tensor, kv: Optional[Tensor] = None) -> list[Projected]:
        """Queries, keys, values and, where there is one, the projected gate."""
        convolves = not self.mixer.quadratic or self.local is not None
        return project(self.qkv, x, self.widths, kv, convolves)

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        kv: Optional[Tensor] = None,
        context_tokens: Optional[Tensor] = None,
        out_scale: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        **kwargs,
    ) -> Tensor:
        """Attend.

        Args:
            x (Tensor): Tokens, (B, N, C).
            grid (Grid): The grid they live on.
            kv (Tensor, optional): Tokens of keys and values, (B, M, C), when they are not ``x`` (reduced keys).
            context_tokens (Tensor, optional): Tokens (B, N', C) whose mean is the mixer's context, ``x`` by default.
            out_scale (Tensor, optional): Layer scale, (C,), see :func:`~mmlinattn.layers.apply_linear`.
            residual (Tensor, optional): Added to the result, (B, N, C).
            key_grid, mask, rotary, bias: See :meth:`TokenMixer.forward`.

        Returns:
            Tensor: (B, N, C).
        """
        q, k, v, *gate = split_parts(self.project(x, kv))
        mask, context = kwargs.get('mask'), None
        if mask is not None:  # what padding was projected to
            v = v * mask.unsqueeze(-1).to(v.dtype)
        if self.mixer.context:
            context = mean_token(x if context_tokens is None else context_tokens, mask)
        out = self.mix(q, k, v, grid, context=context, **kwargs)
        return apply_linear(self.proj, self.apply_gate(out, x, *gate), out_scale, residual=residual)

    def apply_gate(self, out: Tensor, x: Tensor, projected: Optional[Tensor] = None) -> Tensor:
        if self.gate is None:
            return out
        if projected is not None:
            return multiply(out, projected)
        return multiply(out, x if self.gate == 'identity' else x.tanh())


class GlobalAttention(Attention):
    """:class:`Attention` over the whole map."""

    def forward(self, x: Tensor, residual: Optional[Tensor] = None, **shared) -> Tensor:  # type: ignore[override]
        grid = Grid(*x.shape[1:3])
        if residual is not None:
            shared['residual'] = residual.flatten(1, 2)
        return super().forward(x.flatten(1, 2), grid, **shared).unflatten(1, grid[:2])


def split_parts(parts: Sequence[Projected]) -> list[Tensor]:
    """Queries, keys, values and, where there is one, the gate."""
    return [tensor for whole, widths in parts for tensor in ((whole,) if len(widths) == 1 else split(whole, widths))]


def mean_token(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    """Mean of the real tokens: (B, N, C), (B, N) -> (B, C), accumulated in float32 or better."""
    dtype = accumulation_dtype(x)
    if mask is None:
        return x.mean(dim=1, dtype=dtype).to(x.dtype)
    weight = mask.to(dtype)
    total = (x * weight.unsqueeze(-1)).sum(dim=1)
    return (total / weight.sum(dim=1, keepdim=True).clamp(min=1)).to(x.dtype)


# --- depth-wise convolutions of tokens on their grid ------------------------------------------------------------------


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """Patch tokens (B, prefix + h * w, C) as an (B, C, h, w) view in channels-last memory."""
    return to_image(x[:, grid.prefix :].unflatten(1, (grid.height, grid.width)))


def to_tokens(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, h * w, C); a view when the memory is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def add_local(out: Tensor, v: Tensor, conv, grid: Grid, watched: bool = False) -> Tensor:
    """Add a convolution of the value map to the patch tokens of ``out``; class tokens have no neighbours.

    Args:
        out (Tensor): (B, N, C); in inference it may be written over.
        v (Tensor): Values, (B, N, C).
        conv (Callable): Takes a map (B, C, h, w) and the map ``onto`` which it adds its result.
        grid (Grid): Where the tokens lie.
        watched (bool): Whether hooks see what ``conv`` gives: it is to be the convolution alone.

    Returns:
        Tensor: (B, N, C).
    """
    if not grid.prefix and not watched:
        return to_tokens(conv(to_map(v, grid), onto=to_map(out, grid)))
    local = to_tokens(conv(to_map(v, grid)))
    return out + (F.pad(local, (0, 0, grid.prefix, 0)) if grid.prefix else local)


def check_local_kernel(size: Optional[int]) -> Optional[int]:
    """``size`` itself, of a convolution that keeps the size of its map, or None for none.

    Raises:
        ValueError: For another one.
    """
    if size is not None and (type(size) is not int or size < 1 or size % 2 == 0):
        raise ValueError(f'local_kernel={size!r} has to be None or an odd int >= 1')
    return size


class DepthwiseConv2d(nn.Conv2d):
    """:func:`~mmlinattn.ops.depthwise_conv2d` with its weights.

    Args:
        dim (int): Channels C.
        kernel_size (int): Odd.
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor, onto: Optional[Tensor] = None) -> Tensor:
        return ops.depthwise_conv2d(x, self.weight, self.bias, onto)
