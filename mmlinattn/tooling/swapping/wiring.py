# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Settings of necks and heads for the maps they read, rewritten for other maps.

All of it rests on one comparison: a value under a key such as ``in_channels`` that equals the measured channels of the
upstream maps, or a list of them, becomes the channels of the maps that take their place.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Optional

from .zoo import FeatureMap

_CHANNELS = re.compile(r'(^|_)(in_channels(_list)?|in_planes|inplanes)$')
_STRIDES = ('strides', 'feature_strides', 'featmap_strides', 'in_strides')
NO_READER = ('backbone', 'neck', 'train_cfg', 'test_cfg', 'data_preprocessor')


def assign_stages(
    old: Sequence[FeatureMap], stages: Sequence[FeatureMap], deepest_last: bool
) -> Optional[tuple[int, ...]]:
    """Indices, ascending, of the stages that stand in for upstream's maps; None where these do not go from fine to
    coarse or are too many.

    By stride; of dilated networks, whose last maps share a stride, by order. ``deepest_last`` takes the deepest stage
    for the last map, as in segmentors and classifiers, whose predictions are resized anyway; detectors tie their
    anchors to strides.
    """
    if any(a.stride is None or b.stride is None or a.stride > b.stride for a, b in zip(old, old[1:])):
        return None
    choices = list(itertools.combinations(range(len(stages)), len(old)))
    if deepest_last:
        choices = [chosen for chosen in choices if chosen[-1] == len(stages) - 1]
    # of equally good ones the deeper
    return min(reversed(choices), key=lambda chosen: _distance(old, [stages[i] for i in chosen]), default=None)


def _distance(old: Sequence[FeatureMap], new: Sequence[FeatureMap]) -> float:
    return sum(abs(math.log2((a.stride or 32) / (b.stride or 32))) for a, b in zip(old, new))


def nearest_stages(old: Sequence[FeatureMap], stages: Sequence[FeatureMap]) -> list[int]:
    """The stage nearest in stride to each map."""
    return [min(range(len(stages)), key=lambda i: _distance([out], [stages[i]])) for out in old]


class Wiring:
    """Rewrites the parts of a config that read maps.

    Args:
        old: The maps they read so far, by position.
        new: What takes the place of each.
        keep: Positions that are read, ascending; the others are no longer returned. None for all.
        deep: Whether a single number below the first level, without ``in_index``, may be the channels of a map; inside
            heads, decoders often have the width of one of several maps.
    """

    def __init__(
        self,
        old: Sequence[FeatureMap],
        new: Sequence[FeatureMap],
        keep: Optional[Sequence[int]] = None,
        deep: bool = True,
    ):
        self.old, self.new, self.deep = [out.channels for out in old], [out.channels for out in new], deep
        self.old_strides, self.new_strides = [out.stride for out in old], [out.stride for out in new]
        self.keep = list(range(len(old))) if keep is None else list(keep)

    def __call__(self, node: Any, depth: int = 0, parent: str = '') -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)(self(item, depth, parent) for item in node)
        if not isinstance(node, dict):
            return node
        out = {}
        for key, value in node.items():
            is_extractor = key == 'out_channels' and 'roi_extractor' in parent and isinstance(value, int)
            if is_extractor or (_CHANNELS.search(key) and _is_numbers(value)):
                found = self._channels(key, value, node.get('in_index'), depth)
                out[key] = value if found is None else found
            elif key == 'in_index' and value is not None:
                out[key] = self._index(value)
            elif key in _STRIDES and _is_numbers(value) and list(value) == self.old_strides:
                out[key] = type(value)(self.new_strides[i] for i in self.keep)
            elif key in ('start_level', 'end_level') and isinstance(value, int) and value > 0:
                out[key] = value - sum(position not in self.keep for position in range(value))
            else:
                out[key] = value if key in NO_READER else self(value, depth + 1, key)
        return out

    def _channels(self, key: str, value: Any, index: Any, depth: int) -> Any:
        """The new channels; None where the value is not about the maps."""
        old, new = self.old, self.new
        if isinstance(value, (list, tuple)):
            values = list(value)
            if isinstance(index, (list, tuple)):
                is_read = values == [old[i] for i in index if -len(old) <= i < len(old)]
                return type(value)(new[i] for i in index) if is_read else None
            if values == old[::-1] and values != old:
                return type(value)(new[i] for i in reversed(self.keep))
            for first in range(len(old) - len(values), -1, -1):
                here = range(first, first + len(values))
                if values == [old[i] for i in here]:
                    return type(value)(new[i] for i in here if i in self.keep)
            return None
        if key.startswith('c1_'):  # of DeepLabV3+: the first map, without regard to in_index
            return new[0] if old[0] == value else None
        if isinstance(index, int):
            return new[index] if -len(old) <= index < len(old) and old[index] == value else None
        if depth and not self.deep:
            return None
        found = [i for i in self.keep if old[i] == value]
        if found:
            return new[found[-1]]
        return sum(new[i] for i in self.keep) if len(old) > 1 and value == sum(old) else None

    def _index(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._index(item) for item in value)
        count = len(self.old)
        if not -count <= value < count or value % count not in self.keep:  # the former: of a map that the neck makes
            return value
        place = self.keep.index(value % count)
        return value if value < 0 and place == len(self.keep) - 1 else place


def _is_numbers(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return all(type(item) is int for item in value) if is_list else type(value) is int
