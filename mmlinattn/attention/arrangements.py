# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Attention modules on (B, H, W, C) maps with spatially reduced keys, windows or stripes, for any token mixer."""

from typing import Optional, Union

import torch
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn

from ..layers.norms import build_branch_norm
from ..layers.patch_embed import PatchConv2d
from ..layers.positions import RelativePositionBias
from ..ops.leaves import Linear
from ..ops.maps import pad_to_multiple
from ..ops.tokens import to_image, unflatten
from .base import Attention, LePEMixer, ReducedKeysAttention, mean_token
from .context import MapWindows, StageContext
from .mixer import LEFT_TO_BACKBONE, LocalMixer


class ReducedAttention(ReducedKeysAttention):
    """Spatial-reduction attention: keys and values of a feature map after a strided convolution and a norm (PVT
    Eq. 2-3).

    Args:
        dim, num_heads, mixer, kwargs: See :class:`Attention`.
        ratio (int): Reduction of height and width; the feature map is zero-padded to a multiple of it.
        norm_cfg (dict): Norm of the reduced feature map.

    Raises:
        ValueError: For a ratio above 1 with a mixer or ``local_kernel`` that convolves the values of the whole map.
    """

    def __init__(self, dim: int, num_heads: int, mixer, ratio: int, norm_cfg: dict, **kwargs) -> None:
        super().__init__(dim, num_heads, mixer, **kwargs)
        convolves = any(isinstance(part, (nn.Conv1d, nn.Conv2d)) for part in self.mixer.modules())
        if ratio > 1 and (self.local is not None or (convolves and isinstance(self.mixer, LocalMixer))):
            raise ValueError(f'ratio={ratio}: {mixer!r} adds a convolution of the values and needs their whole map')
        self.ratio = ratio
        self.sr = PatchConv2d(dim, dim, ratio)
        self.norm = build_branch_norm(norm_cfg, dim)

    def reduce(self, x: Tensor) -> Tensor:
        return self.norm(self.sr(to_image(pad_to_multiple(x, self.ratio))).permute(0, 2, 3, 1))


def check_not_sequential(mixer, spec) -> None:
    """Check that a mixer does not read all tokens as one sequence, which windows and stripes would cut.

    Raises:
        ValueError: It does. The message names the attention by ``spec``.
    """
    if mixer.sequential:
        raise ValueError(f'attention {spec!r} reads the sequence of all tokens; windows and stripes cut it')


class WindowAttention(Attention):
    """Attention within windows, shifted or not; padding never changes the output of a valid token.

    Linear projections run on the whole feature map, before windows are cut and after they are merged.

    Args:
        dim, num_heads, mixer, kwargs: See :class:`Attention`.
        window (tuple[int, int], optional): Largest height and width of a window; None for the whole feature map.
        shift (bool): Shift the windows by half, as in every second block of Swin.
        relative_bias (bool): Add Swin's relative position bias, if there is a ``window`` and the mixer supports a bias.

    Raises:
        ValueError: For ``shift`` with a mixer that supports no bias, a ``window`` with one that depends on token order,
            and a window with relative position bias of more than 8192 tokens.
    """

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
            check_not_sequential(self.mixer, mixer)
            window = (window[0], window[1])
        if shift and not self.mixer.bias:
            raise ValueError(
                f'shift=True: {mixer!r} takes no bias, needed to hide the opposite border in shifted windows'
            )
        self.window = window
        self.shift = shift
        self.relative_bias = None
        if relative_bias and self.mixer.bias and window is not None:
            self.relative_bias = RelativePositionBias(window, self.mixer.num_heads)

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        projected, gate = self.qkv(x), []
        if len(self.widths) > 3:
            projected, *gate = projected.split((sum(self.widths[:3]), *self.widths[3:]), dim=-1)
        windows, real, hidden = windows_of(stage, x).get(self.window, self.shift)
        # windows are padded with zeros after the projection, so values of padding are zero
        q, k, v = windows.partition_qkv(projected, self.widths[:3])
        del projected  # its memory is free for the mixed values
        context = None
        if self.mixer.context:
            context = mean_token(windows.partition(x if stage.source is None else stage.source), real)
        grid = windows.grid(x)
        if self.mixer.local_keys:
            grid = grid._replace(regions=windows.regions_of_tokens(x))
        bias = self.map_bias(windows, hidden, x.shape[0])
        out = windows.merge(self.mix(q, k, v, grid, mask=real, bias=bias, context=context), x.shape[0])
        return self.proj(self.apply_gate(out, x, gate))

    def map_bias(self, windows, hidden: Optional[Tensor], batch: int) -> Optional[Tensor]:
        """Add the relative position bias and the mask of a shifted map.

        Args:
            windows (Windows | DynamicWindows): Windows of the feature map; there are W in an image.
            hidden (Tensor, optional): (W, 1, N, N), logits added between regions of a shifted map.
            batch (int): Number of images B.

        Returns:
            Tensor | None: Bias of the logits, (1 or B * W, heads or 1, N, N); None without both terms.
        """
        # four dimensions: for a bias of three, PyTorch does not use its fused attention
        bias = None if self.relative_bias is None else self.relative_bias(*windows.window)[None]
        if hidden is None or not self.mixer.bias:
            return bias
        return (hidden if bias is None else bias + hidden).repeat(batch, 1, 1, 1)


class StripeAttention(BaseModule):
    """Cross-shaped windows: half of the heads attend in vertical, half in horizontal stripes (CSWin Eq. 3-5).

    Args:
        dim (int): Channels C, a multiple of ``num_heads``.
        num_heads (int): Number of heads, even.
        mixer (str | dict): The attention of both halves.
        stripe (int): Width of a stripe in tokens; it is as long as the feature map.
        local_kernel (int, optional): Size of the locally-enhanced position encoding of the values.

    Raises:
        ValueError: For an odd ``num_heads``, or a mixer that depends on token order or has the gate ``'identity'`` or
            ``'tanh'``.
    """

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
            raise ValueError(f'num_heads={num_heads}: expected an even number, for two directions of stripes')
        self.stripe = stripe
        self.branches = ModuleList(LePEMixer(dim // 2, num_heads // 2, mixer, None, local_kernel) for _ in range(2))
        mixer_module = self.branches[0].mixer
        check_not_sequential(mixer_module, mixer)
        if mixer_module.gate not in (None, 'projection', *LEFT_TO_BACKBONE):
            raise ValueError(f'gate={mixer_module.gate!r} of {mixer!r} is not available in stripes')
        widths = mixer_module.widths
        if mixer_module.gate == 'projection':
            widths = (*widths, widths[2])
        self.widths = tuple(widths)
        self.qkv = Linear(dim, 2 * sum(widths))
        self.proj = Linear(2 * widths[2], dim)

    def forward(self, x: Tensor, stage: StageContext) -> Tensor:
        # (B, H, W, 2, w) for each of q, k, v (and gate): the halves of the channels belong to the two directions
        parts = self.qkv(x).split([2 * width for width in self.widths], dim=-1)
        parts = [unflatten(part, -1, (2, -1)) for part in parts]
        sources = (x if stage.source is None else stage.source).chunk(2, dim=-1)
        outs = []
        for i, window in enumerate(((None, self.stripe), (self.stripe, None))):
            windows, real, _ = windows_of(stage, x).get(window)
            stripes = windows.partition(torch.cat([part[..., i, :] for part in parts], dim=-1))
            q, k, v, *gate = stripes.split(self.widths, dim=-1)
            context = mean_token(windows.partition(sources[i]), real) if self.branches[i].mixer.context else None
            out = self.branches[i].mix(q, k, v, windows.grid(x), mask=real, context=context)
            outs.append(windows.merge(out * gate[0] if gate else out, x.shape[0]))
        return self.proj(torch.cat(outs, dim=-1))


def windows_of(stage: StageContext, x: Tensor) -> MapWindows:
    """Return the shared windows of the stage, or new ones of the feature map ``x`` if the context has none."""
    return stage.windows or MapWindows(x)
