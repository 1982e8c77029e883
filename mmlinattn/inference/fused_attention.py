# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Twins (fused versions) of attentions that add local terms and apply gates in place, in the mixer's result."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..attention import (
    Attention,
    FocusedMixer,
    GlobalAttention,
    Grid,
    InLineMixer,
    LocalMixer,
    RALAMixer,
    ReducedAttention,
    WindowAttention,
)
from ..attention.angular import AngularMixer
from ..attention.arrangements import windows_of
from ..attention.base import LePEMixer
from ..ops.rank_augmented import rala_in_place
from ..utils.private_apis import is_altered
from .fused import LinearStep, Twin, add_in_place, is_own, twin_of
from .regions import assemble, cut, regions_of
from .snapshot import is_known


class AddInPlace(Twin):
    def add_local(self, out: Tensor, local: Tensor) -> Tensor:
        return add_in_place(out, local)


class LocalStep(AddInPlace, LocalMixer):
    pass


twin_of(AngularMixer, FocusedMixer, InLineMixer)(LocalStep)


@twin_of(RALAMixer)
class RALAStep(Twin, RALAMixer):
    """RALA that overwrites queries and keys instead of allocating new tensors."""

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, **_) -> Tensor:
        return rala_in_place(q, k, v, self.num_heads, self.kernel, rotary, mask, self.weight_scale)


@twin_of(LePEMixer)
class LePEStep(AddInPlace, LePEMixer):
    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        """Allow a twin for projections and a mixer of this package alone, since it overwrites their results."""
        mixer, projections = module.mixer, [children[name] for name in ('qkv', 'q', 'kv') if name in children]
        is_plain = is_own(type(mixer)) and not is_altered(mixer)
        if is_plain and all(isinstance(layer, LinearStep) for layer in projections):
            return True
        children['mixer'] = mixer
        return False


@twin_of(Attention, GlobalAttention, ReducedAttention)
class AttentionStep(LePEStep, Attention):
    @property
    def convolves(self) -> bool:
        """True if a convolution reads the values: projected apart, they are contiguous and need no copy."""
        return self.local is not None or isinstance(self.mixer, LocalMixer)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        if not self.convolves:
            return super().project(x)
        widths = self.widths
        pair, *rest = self.qkv.project(x, [widths[0] + widths[1], *widths[2:]])
        return [*pair.split(widths[:2], dim=-1), *rest]

    def multiply(self, out: Tensor, gate: Tensor) -> Tensor:
        return out.mul_(gate) if out.dtype == gate.dtype else out * gate


@twin_of(WindowAttention)
class WindowStep(AttentionStep, WindowAttention):
    """Attention in windows without padding, see :mod:`.regions`: linear attentions have large windows, and padding may
    be most of the last ones."""

    @classmethod
    def prepare(cls, module, children, precision) -> bool:
        """Require convolutions that pad with zeros, as windows are padded, and known parts without hooks."""
        parts = [*module.mixer.modules(), *([] if module.local is None else module.local.modules())]
        convs = [part for part in parts if isinstance(part, (nn.Conv1d, nn.Conv2d))]
        pads_zeros = all(conv.padding_mode == 'zeros' and not isinstance(conv.padding, str) for conv in convs)
        is_plain = all(is_known(type(part)) for part in parts) and not is_altered(*parts)
        return super().prepare(module, children, precision) and pads_zeros and is_plain

    def mix_windows(self, projected: Tensor, x: Tensor, stage) -> Tensor:
        windows: Any = windows_of(stage, x).get(self.window, self.shift)[0]
        regions: Any = [] if self.mixer.quadratic or any(windows.shift) else regions_of(x, windows)
        if not regions:
            return super().mix_windows(projected, x, stage)
        source = x if stage.source is None else stage.source
        means = cut(source, regions, mean=True) if self.mixer.context else [None] * len(regions)
        grids = (Grid(part.window[0], part.window[1], within=windows.window) for _, _, part in regions)
        widths = self.widths[:3]
        # values for a convolution are cut apart from queries and keys, to be contiguous
        groups = [widths[:2], widths[2:]] if self.convolves else [widths]
        parts = projected.split([*map(sum, groups)], dim=-1)

        def mix(cuts, grid, mean) -> Tensor:
            q, k, v = (t for part, group in zip(cuts, groups) for t in part.split(group, dim=-1))
            return self.mix(q, k, v, grid, context=mean)

        return assemble(map(mix, zip(*(cut(part, regions) for part in parts)), grids, means), regions)
