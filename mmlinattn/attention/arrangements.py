# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How hosts lay tokens around an attention. All take and give (B, H, W, C) maps; none knows a method."""

import itertools
import math
from collections.abc import Iterable
from typing import Optional, Union

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn

from ..layers.linear import Projected, apply_linear
from ..layers.patch_embed import strided_conv
from ..ops import dispatch
from ..ops.softmax import masked_logit
from ..ops.tensors import multiply
from .base import Attention, Grid, Mixing, mean_token, split_parts
from .windows import OpenWindows, Region, Windows, assemble, cut


class ReducedAttention(Attention):
    """Global attention whose keys and values live on a map reduced by a strided convolution and a norm (PVT Eq. 2-3).

    Args:
        dim, num_heads, mixer, kwargs: See :class:`Attention`.
        ratio (int): Reduction of height and width; the map is zero-padded to a multiple of it.
        norm_cfg (dict): Norm of the reduced map.
    """

    def __init__(self, dim: int, num_heads: int, mixer, ratio: int, norm_cfg: dict, **kwargs) -> None:
        super().__init__(dim, num_heads, mixer, **kwargs)
        self.ratio = ratio
        self.sr = nn.Conv2d(dim, dim, ratio, ratio)
        self.norm = build_norm_layer(norm_cfg, dim)[1]

    def forward(self, x: Tensor, residual: Optional[Tensor] = None, **shared) -> Tensor:  # type: ignore[override]
        height, width = x.shape[1:3]
        reduced = self.norm(strided_conv(self.sr, x))
        grid, key_grid = Grid(height, width), Grid(*reduced.shape[1:3])
        if residual is not None:
            shared['residual'] = residual.flatten(1, 2)
        out = super().forward(x.flatten(1, 2), grid, kv=reduced.flatten(1, 2), key_grid=key_grid, **shared)
        return out.unflatten(1, grid[:2])


class MapWindows:
    """The windows of one map with their masks, made once a forward pass and shared by the blocks of a stage."""

    def __init__(self, x: Tensor) -> None:
        self.map = x
        self._made: dict[tuple, tuple] = {}

    def get(self, window, shift: bool) -> tuple[Union[Windows, OpenWindows], Optional[Tensor], Optional[Tensor]]:
        """Windows, mask of real tokens (B * windows, N) and additive mask of foreign regions (windows, 1, N, N)."""
        key = (window, shift)
        if key not in self._made:
            height, width = self.map.shape[1:3]
            windows = Windows.fit(height, width, window, shift)
            region, hidden = windows.regions_of_tokens(self.map), None
            if region is not None:
                apart = region[:, :, None] != region[:, None, :]
                hidden = torch.zeros_like(apart, dtype=self.map.dtype)
                hidden = hidden.masked_fill(apart, masked_logit(self.map.dtype))[:, None]
            self._made[key] = windows, windows.real(self.map), hidden
        return self._made[key]


class RelativePositionBias(nn.Module):
    """Swin's bias of the attention map: a learned value for each head and offset within a window.

    Args:
        window (tuple[int, int]): Largest window; smaller ones use the offsets they have.
        num_heads (int): Number of heads.

    Raises:
        ValueError: For a window of more than :attr:`max_tokens` tokens.
    """

    resizable = 'table'  # what checkpoints of another window have in another size, see :meth:`fit`
    # N tokens have N^2 pairs: at 8192, 512 MiB of index a block, and 256 MiB of bias a head and block in each pass
    max_tokens = 8192

    def __init__(self, window: tuple[int, int], num_heads: int) -> None:
        super().__init__()
        self.window = rows, columns = tuple(window)
        if rows * columns > self.max_tokens:
            raise ValueError(
                f'window_size={self.window}: a window with relative position bias may have {self.max_tokens} tokens at '
                f'most (90 x 90), not {rows * columns}; a linear attention takes larger ones'
            )
        self.table = nn.Parameter(torch.zeros((2 * rows - 1) * (2 * columns - 1), num_heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def fit(self, table: Tensor) -> Tensor:
        """A checkpoint's table of another square window, ((2n - 1)^2, heads), resized bicubically as Swin's
        fine-tuning does; of another form it stays as it is, for the report."""
        side = round(table.shape[0] ** 0.5) if table.dim() == 2 else 0
        if table.shape == self.table.shape or not side or side**2 != table.shape[0]:
            return table
        size = tuple(2 * length - 1 for length in self.window)
        image = table.T.unflatten(1, (side, side))[None].float()
        image = F.interpolate(image, size=size, mode='bicubic', align_corners=False)
        return image[0].flatten(1).T.contiguous().to(table.dtype)

    def forward(self, height: int, width: int) -> Tensor:
        """(heads, N, N) for a window of ``height`` x ``width``."""
        index = self.index(height, width)
        return self.table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)

    def index(self, height: int, width: int) -> Tensor:
        """Row of the table for each pair of tokens of a window, (N, N)."""
        # Made anew: a buffer that no checkpoint holds is lost where models are built without memory (``torch.device(
        # 'meta')``) and then given their weights.
        rows, columns = (torch.arange(size, device=self.table.device) for size in (height, width))
        row = rows[:, None] - rows + self.window[0] - 1
        column = columns[:, None] - columns + self.window[1] - 1
        index = row[:, None, :, None] * (2 * self.window[1] - 1) + column[None, :, None, :]  # (h, w, h, w)
        return index.flatten(2).flatten(0, 1)


def check_order(mixer, spec) -> None:
    """Raises:
    ValueError: For a mixer that reads tokens in an order that windows do not keep.
    """
    if mixer.sequential:
        raise ValueError(f'attention {spec!r} goes over the sequence of all tokens, which windows and stripes cut')


class WindowAttention(Attention):
    """Attention within windows, shifted or not; padding never changes the output of a real token.

    Args:
        dim, num_heads, mixer, kwargs: See :class:`Attention`.
        window (tuple[int, int], optional): Largest window; None for the whole map.
        shift (bool): Shift the windows by half, as every second block of Swin.
        relative_bias (bool): Swin's relative position bias, for mixers that take a bias.
    """

    small_numel = 2**22  # of a map whose windows pad, see :meth:`regions_of`

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mixer,
        window: Optional[tuple[int, int]],
        shift: bool = False,
        relative_bias: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, mixer, **kwargs)
        if window is not None:
            check_order(self.mixer, mixer)
        self.window = window
        self.shift = shift
        self.relative_bias = None
        if relative_bias and self.mixer.bias and window is not None:
            self.relative_bias = RelativePositionBias(window, self.mixer.num_heads)

    def forward(  # type: ignore[override]
        self, x: Tensor, map_windows: Optional[MapWindows] = None, residual: Optional[Tensor] = None, **shared
    ) -> Tensor:
        map_windows = map_windows or MapWindows(x)
        windows, real, regions = map_windows.get(self.window, self.shift)
        # a recorded graph has to hold as many windows at any size
        is_cut_alike = self.mixer.quadratic or dispatch.is_traced()
        if isinstance(windows, Windows) and not (is_cut_alike or windows.is_whole or any(windows.shift)):
            return self.around_windows(x, windows, real, residual=residual, **shared)
        # four dimensions: with three, PyTorch leaves its fused attention
        bias = None if self.relative_bias is None else self.relative_bias(*windows.window)[None]
        if regions is not None and self.mixer.bias:
            bias = regions if bias is None else bias + regions
            bias = bias.repeat(x.shape[0], 1, 1, 1)
        if 'context_tokens' in shared:
            shared['context_tokens'] = windows.partition(shared['context_tokens'])
        tokens, grid = windows.partition(x), windows.grid(x)
        if self.mixer.local_keys:
            grid = grid._replace(regions=windows.regions_of_tokens(x))
        out = windows.merge(super().forward(tokens, grid, mask=real, bias=bias, **shared), x.shape[0])
        return out if residual is None else residual + out

    def around_windows(
        self,
        x: Tensor,
        windows: Windows,
        real: Optional[Tensor],
        context_tokens: Optional[Tensor] = None,
        out_scale: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        **shared,
    ) -> Tensor:
        """The whole map is projected at once, before it is cut and after it is put together.

        Windows of a linear attention are large, and padding may be most of the last ones. So those of large maps end
        where the map does, each size a group of its own. On small maps padding takes less time than the parallel
        regions, or launches, of a group.
        """
        regions, parts = self.regions_of(x, windows), self.project(x)
        source = x if context_tokens is None else context_tokens
        mask = real if len(regions) == 1 else None

        def mixed_regions():
            pieces = [cut(p.tensor, regions) for p in parts]
            contexts: Iterable[Optional[Tensor]] = itertools.repeat(None)
            if self.mixer.context:
                means = list(cut(source, regions, mean=True))
                contexts = self.mixer.prepare(torch.cat(means)).split([len(part) for part in means])
            for (_, _, part), context, *tensors in zip(regions, contexts, *pieces):
                height, width = part.window
                tokens = [Projected(tensor, p.widths) for tensor, p in zip(tensors, parts)]
                q, k, v, *gate = split_parts(tokens)
                grid = Grid(height, width, within=windows.window)
                out = self.mix(q, k, v, grid, mask=mask, context=context, **shared)
                yield multiply(out, gate[0]) if gate else out

        out = assemble(mixed_regions(), regions)
        out = out if self.gate == 'projection' else self.apply_gate(out, x)
        return apply_linear(self.proj, out, out_scale, residual=residual)

    def regions_of(self, x: Tensor, windows: Windows) -> list[Region]:
        """The regions that ``x`` (B, H, W, C) is cut in: one that pads where that is little, else those that do not."""
        pads_little = 2 * math.prod(windows.padded) <= 3 * windows.height * windows.width
        most = self.small_numel // 2 if dispatch.records() else self.small_numel  # its gradient is padded, too
        if pads_little and x.numel() <= most:
            return [(slice(0, windows.height), slice(0, windows.width), windows)]
        return windows.regions()


class StripeAttention(BaseModule):
    """Cross-shaped windows: half of the heads mix within vertical, half within horizontal stripes (CSWin Eq. 3-5).

    Args:
        dim (int): Width C, a multiple of ``2 * num_heads / 2``.
        num_heads (int): Number of heads, even.
        mixer (str | dict): The attention of both halves.
        stripe (int): Width of a stripe; its length follows the map.
        local_kernel (int, optional): Size of the locally-enhanced position encoding of the values.

    Raises:
        ValueError: For an odd ``num_heads``.
    """

    adds_residual = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mixer: Union[str, dict],
        stripe: int,
        local_kernel: Optional[int] = 3,
        init_cfg=None,
    ) -> None:
        super().__init__(init_cfg)
        if num_heads % 2:
            raise ValueError(f'num_heads={num_heads} has to be even to be split over two directions of stripes')
        self.stripe = stripe
        self.branches = ModuleList(Mixing(dim // 2, num_heads // 2, mixer, None, local_kernel) for _ in range(2))
        mixer_module = self.branches[0].mixer
        check_order(mixer_module, mixer)
        if mixer_module.gate not in (None, 'projection'):
            raise ValueError(f'gate={mixer_module.gate!r} of {mixer!r} is not available in stripes')
        widths = mixer_module.widths
        if mixer_module.gate:
            widths = (*widths, dim // 2)
        self.widths = tuple(widths)
        self.qkv = nn.Linear(dim, 2 * sum(widths))
        self.proj = nn.Linear(2 * widths[2], dim)

    @property
    def wants_input(self) -> bool:
        return self.branches[0].mixer.context

    def forward(
        self,
        x: Tensor,
        map_windows: Optional[MapWindows] = None,
        context_tokens: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
        **shared,
    ) -> Tensor:
        map_windows = map_windows or MapWindows(x)
        # (B, H, W, 2, w) for each of q, k, v (and gate): the halves of the channels belong to the two directions
        parts = apply_linear(self.qkv, x).split([2 * width for width in self.widths], dim=-1)
        parts = [part.unflatten(-1, (2, -1)) for part in parts]
        outs = []
        for i, window in enumerate(((None, self.stripe), (self.stripe, None))):
            windows, real, _ = map_windows.get(window, False)
            stripes = windows.partition(torch.cat([part[..., i, :] for part in parts], dim=-1))
            q, k, v, *gate = stripes.split(self.widths, dim=-1)
            context = None
            if context_tokens is not None:
                context = mean_token(windows.partition(context_tokens.chunk(2, dim=-1)[i]), real)
            out = self.branches[i].mix(q, k, v, windows.grid(x), mask=real, context=context, **shared)
            outs.append(windows.merge(out * gate[0] if gate else out, x.shape[0]))
        return apply_linear(self.proj, torch.cat(outs, dim=-1), residual=residual)
