# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rewrite channels, strides and indices in the configs of necks and heads for the feature maps of the new backbone.

A value under a key such as ``in_channels`` is rewritten if it equals the channels of an upstream feature map, or a list
of them.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Optional

from .upstream import dicts, listed
from .zoo import FeatureMap

_CHANNELS = ('_in_channels', '_in_planes', '_inplanes')
_STRIDES = ('strides', 'feature_strides', 'featmap_strides', 'in_strides')
# keys of parts that do not read the feature maps; teachers of distillation have their own backbones
_TEACHERS = ('teacher_backbone', 'teacher_neck', 'teacher_bbox_head', 'teacher')
_NO_READERS = ('backbone', 'neck', 'train_cfg', 'test_cfg', 'data_preprocessor', *_TEACHERS)


def assign_stages(old: Sequence[FeatureMap], stages: Sequence[FeatureMap], deepest_last: bool) -> Optional[list[int]]:
    """Return the indices of the stages, ascending, that replace the feature maps of the upstream backbone.

    They have the nearest strides. The last feature maps of dilated networks share a stride and match by order. Among
    equal matches the deepest stages are taken.

    Args:
        old: Feature maps of the upstream backbone.
        stages: Feature maps of the new backbone.
        deepest_last: The last feature map matches the deepest stage. False for detectors, as anchors depend on strides.

    Returns:
        list[int] | None: None for more feature maps than stages, and for strides that are unknown or descend.
    """
    if any(a.stride is None or b.stride is None or a.stride > b.stride for a, b in zip(old, old[1:])):
        return None
    choices = map(list, itertools.combinations(range(len(stages)), len(old)))
    fitting = [chosen for chosen in choices if not deepest_last or chosen[-1] == len(stages) - 1]
    return min(reversed(fitting), key=lambda chosen: _distance(old, [stages[i] for i in chosen]), default=None)


def _distance(old: Sequence[FeatureMap], new: Sequence[FeatureMap]) -> float:  # of the strides in octaves
    return sum(abs(math.log2((a.stride or 32) / (b.stride or 32))) for a, b in zip(old, new))


def nearest_stages(old: Sequence[FeatureMap], stages: Sequence[FeatureMap]) -> list[int]:
    """Return the index of the new stage with the nearest stride for each upstream feature map."""
    return [min(range(len(stages)), key=lambda i: _distance([out], [stages[i]])) for out in old]


def positions_read(network: dict, count: int) -> list[int]:
    """Return the indices of the feature maps that a network reads, of ``count`` that its backbone returns. The indices
    follow from ``start_level`` of the first neck, or ``in_index`` of the heads."""
    necks, found = listed(network.get('neck')), set[int]()
    if necks:
        return list(range(count))[necks[0].get('start_level') or 0 :]
    for head in (head for key, part in network.items() if key not in _NO_READERS for head in listed(part)):
        indices: list[int] = []
        for node in dicts(head):
            index = node.get('in_index')
            indices += [index] if isinstance(index, int) else index or []
            if 'c1_in_channels' in node:  # DeepLabV3+ reads the first feature map, too
                indices.append(0)
        channels = head.get('in_channels') if isinstance(head, dict) else None
        if channels and not indices:  # as MMSegmentation's heads
            indices = [-1] if isinstance(channels, int) else list(range(count))
        found.update(i % count for i in indices)
    return sorted(found) or list(range(count))


class Wiring:
    """Rewrite the parts of a config that read feature maps.

    Args:
        old: The upstream feature maps.
        new: The replacement of each.
        keep: Ascending indices of the feature maps that the new backbone returns; None for all.
        deep: Rewrite single numbers without ``in_index`` below the first level, too. Such numbers may be unrelated:
            decoders inside heads often have as many channels as one of several feature maps.
    """

    def __init__(
        self,
        old: Sequence[FeatureMap],
        new: Sequence[FeatureMap],
        keep: Optional[Sequence[int]] = None,
        deep: bool = True,
    ) -> None:
        self.count, self.deep = len(old), deep
        self.keep = list(range(self.count)) if keep is None else list(keep)
        self.old, self.new = ({i: maps[i].channels for i in range(-self.count, self.count)} for maps in (old, new))
        self.old_strides, self.new_strides = [out.stride for out in old], [new[i].stride for i in self.keep]

    def heads(self, network: dict) -> dict:
        """Return a copy of a network with new channels, strides and indices in all heads."""
        return {key: value if key in _NO_READERS else self(value, 0, key) for key, value in network.items()}

    def __call__(self, node: Any, depth: int = 0, parent: str = '') -> Any:
        """Return a rewritten copy of ``node``, a part of a config at this ``depth`` below the key ``parent``."""
        if isinstance(node, (list, tuple)):
            return type(node)(self(item, depth, parent) for item in node)
        if not isinstance(node, dict):
            return node
        out = {}
        for key, value in node.items():
            if f'_{key}'.endswith(_CHANNELS) or (key == 'out_channels' and 'roi_extractor' in parent):
                index = 0 if key.startswith('c1_') else node.get('in_index')
                value = self._channels(value, index, self.deep or not depth)
            elif key == 'in_index' and value is not None and len(self.keep) < self.count:
                many = isinstance(value, (list, tuple))
                kept = [self.keep.index(i % self.count) for i in (value if many else [value])]
                value = type(value)(kept) if many else kept[0]
            elif key in _STRIDES and isinstance(value, (list, tuple)) and list(value) == self.old_strides:
                value = type(value)(self.new_strides)
            elif key in ('start_level', 'end_level') and isinstance(value, int) and value > 0:
                value -= self.keep[0]
            elif key not in _NO_READERS:
                value = self(value, depth + 1, key)
            out[key] = value
        return out

    def _channels(self, value: Any, index: Any, is_read: bool) -> Any:
        """Return the new channels in place of upstream's; a number without ``in_index`` counts only if ``is_read``."""
        if isinstance(value, (list, tuple)):
            runs = [range(first, first + len(value)) for first in range(self.count - len(value), -1, -1)]
            runs.append(range(self.count)[::-1])
            for positions in [index] if isinstance(index, (list, tuple)) else runs:
                if list(value) == [self.old.get(i) for i in positions]:
                    return type(value)(self.new[i] for i in positions if i % self.count in self.keep)
            return value
        positions = self.keep[::-1] if is_read else []
        positions = [index] if isinstance(index, int) else positions
        return next((self.new[i] for i in positions if self.old.get(i) == value), value)
