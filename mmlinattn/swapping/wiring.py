# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Put another backbone into the config of a network: rewrite what its necks and heads say of the maps they read.

All of it rests on one comparison: a value under a key such as ``in_channels`` that equals the measured channels of the
upstream maps, or a list of them, becomes the channels of the maps that take their place. What says nothing of the maps
it reads gets maps of upstream's widths and strides from a :class:`~mmlinattn.necks.MapAdapter`.
"""

import copy
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

from mmengine.registry import MODELS

from ..utils.registering import bare_name
from .measuring import Measured, through
from .zoo import FeatureMap, ZooBackbone

_CHANNELS = re.compile(r'(^|_)(in_channels(_list)?|in_planes|inplanes)$')
_STRIDES = ('strides', 'feature_strides', 'featmap_strides', 'in_strides')
_NO_READER = ('backbone', 'neck', 'train_cfg', 'test_cfg', 'data_preprocessor')
_TEACHERS = ('teacher_backbone', 'teacher_neck', 'teacher_bbox_head', 'teacher')


class Plan(NamedTuple):
    """A network with another backbone.

    Attributes:
        network: Its config.
        remark: What is to be said of it beyond the changed values; '' for nothing.
    """

    network: dict
    remark: str = ''


# Makes a plan; with ``read``, which of the backbone's maps are read by position, one that returns only those.
Way = Callable[..., Plan]


def ways(network: dict, measured: Measured, backbone: ZooBackbone, task: str) -> list[Way]:
    """How a backbone goes into a network: by rewriting, and where that can fail, by adapting.

    Args:
        network: Its config, with ``backbone`` and perhaps ``neck``.
        measured: The maps of its backbone.
        backbone: What is put in.
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.

    Returns:
        One or two ways; none where maps have no stride.
    """
    old, size = measured.maps, measured.size
    if task == 'mmpretrain':
        head = network.get('head')
        # of a head that is a loss alone, the backbone holds the classifier (LeNet, VGG)
        classes = head.get('num_classes', network['backbone'].get('num_classes')) if isinstance(head, dict) else None
        linear_too = [functools.partial(linear, network, backbone)] if isinstance(classes, int) else []
        return [functools.partial(classifier, network, backbone, old, size), *linear_too]
    if not all(out.stride for out in old):
        return []
    if backbone.plain:
        return [functools.partial(plain, network, backbone, old, size)]
    chosen = assign_stages(old, backbone.stages, deepest_last=task == 'mmseg')
    if measured.alone is not None or chosen is None:
        return [functools.partial(_fused, network, backbone, old, measured.alone)]
    if task == 'mmdet' and any(out.stride != backbone.stages[i].stride for out, i in zip(old, chosen)):
        # anchors and points lie by the strides that upstream's maps had; in segmentors all is resized anyway
        strides = ' '.join(str(out.stride) for out in old)
        said = f'the head counts on maps of strides {strides}: those that {backbone.name} lacks are resized ones'
        return [
            functools.partial(adapted, network, backbone, old, _nearest(old, backbone.stages), f'{said} (MapAdapter)')
        ]
    said = 'what follows takes maps of fixed widths and strides only: 1x1 convolutions (MapAdapter) make them'
    adapting = functools.partial(adapted, network, backbone, old, chosen, said)
    if task == 'mmseg' and len(old) > 1 and len({out.stride for out in old}) == 1 and network.get('neck'):
        pyramid = through(network['neck'], old, size)
        if pyramid is not None and assign_stages(pyramid, backbone.stages, True) == tuple(range(len(pyramid))):
            kind = bare_name(_list(network['neck'])[0].get('type'))
            said = f'{kind} made a pyramid of plain maps; the backbone is one itself'
            bare = {**network, 'neck': None}
            return [functools.partial(rewired, bare, backbone, pyramid, range(len(pyramid)), size, said), adapting]
    return [functools.partial(rewired, network, backbone, old, chosen, size, ''), adapting]


def assign_stages(
    old: Sequence[FeatureMap], stages: Sequence[FeatureMap], deepest_last: bool
) -> Optional[tuple[int, ...]]:
    """The stage that stands in for each upstream map, shallow to deep.

    By stride; of dilated networks, whose last maps share a stride, by order.

    Args:
        old: The upstream maps.
        stages: The new ones.
        deepest_last: The last map is to be the deepest stage, as in segmentors and classifiers, whose predictions are
            resized anyway. Detectors tie their anchors to strides.

    Returns:
        Indices into ``stages``, ascending; None where the maps do not go from fine to coarse or are too many.
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


def _nearest(old: Sequence[FeatureMap], stages: Sequence[FeatureMap]) -> list[int]:
    return [min(range(len(stages)), key=lambda i: _distance([out], [stages[i]])) for out in old]


def _list(neck: Any) -> list:
    return list(neck) if isinstance(neck, (list, tuple)) else [neck] if neck else []


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
        self.matched = False  # whether any value was about the maps

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
                self.matched = self.matched or found is not None
                out[key] = value if found is None else found
            elif key == 'in_index' and value is not None:
                out[key] = self._index(value)
            elif key in _STRIDES and _is_numbers(value) and list(value) == self.old_strides:
                out[key] = type(value)(self.new_strides[i] for i in self.keep)
            elif key in ('start_level', 'end_level') and isinstance(value, int) and value > 0:
                out[key] = value - sum(position not in self.keep for position in range(value))
            else:
                out[key] = value if key in _NO_READER else self(value, depth + 1, key)
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
        if key.startswith('c1_'):  # of DeepLabV3+: the first map, whatever in_index says
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


def rewired(
    network: dict,
    backbone: ZooBackbone,
    old: Sequence[FeatureMap],
    chosen: Sequence[int],
    size: tuple[int, int],
    remark: str = '',
    read: Optional[Sequence[bool]] = None,
) -> Plan:
    """Follow the maps through the network: what reads the backbone says the new channels, and where a neck lets maps
    through (segmentors), so does what reads the neck.

    Args:
        chosen: The stage that takes the place of each of ``old``.
        read: Which of them are read.
    """
    keep = [i for i in range(len(old)) if read is None or read[i]]
    new = [backbone.stages[i] for i in chosen]
    of_backbone = Wiring(old, new, keep, deep=len(old) == 1 or bool(network.get('neck')))
    wiring: Optional[Wiring] = of_backbone
    result = {**network, 'backbone': with_outputs(backbone, [chosen[i] for i in keep])}
    necks = _list(network.get('neck'))
    if necks:
        first = of_backbone(necks[0])
        result['neck'] = [first, *necks[1:]] if isinstance(network['neck'], (list, tuple)) else first
        wiring = None
        before, after = through(network['neck'], old, size), through(result['neck'], [new[i] for i in keep], size)
        if before and after and [out.channels for out in before] != [out.channels for out in after]:
            wiring = Wiring(before, after) if len(before) == len(after) else None
    for key, value in network.items() if wiring else ():
        if wiring and key not in (*_NO_READER, *_TEACHERS):
            result[key] = wiring(value, 0, key)
    return Plan(result, remark)


def with_outputs(backbone: ZooBackbone, stages: Sequence[int]) -> dict:
    """The backbone's config with these outputs; all four are what it does unasked."""
    cfg = copy.deepcopy(backbone.cfg)
    if backbone.plain:
        return {**cfg, 'out_type': 'featmap'}
    if list(stages) != list(range(len(backbone.stages))):
        cfg['out_indices'] = tuple(stages)
    return cfg


def adapted(
    network: dict,
    backbone: ZooBackbone,
    old: Sequence[FeatureMap],
    taken: Sequence[int],
    remark: str,
    read: Optional[Sequence[bool]] = None,
    alone: Optional[int] = None,
) -> Plan:
    """Maps like the upstream ones in channels and stride, ``old[i]`` made of stage ``taken[i]``.

    Args:
        read: Which of the stages that are taken are read.
        alone: Position of the map that is given alone in inference.
    """
    used = sorted(set(taken))
    kept = [stage for i, stage in enumerate(used) if read is None or read[i]]
    places = [kept.index(stage) if stage in kept else None for stage in taken]
    scales = [(backbone.stages[i].stride or 32) / (out.stride or 32) for i, out in zip(taken, old)]
    neck: dict[str, Any] = dict(
        type='MapAdapter',
        in_channels=[backbone.stages[i].channels for i in kept],
        out_channels=[out.channels for out in old],
    )
    if places != list(range(len(old))):
        neck['sources'] = places
    if any(scale != 1 for scale in scales):
        neck['scales'] = scales
    if alone is not None:
        neck['inference_output'] = alone
    rest = _list(network.get('neck'))
    result = {**network, 'backbone': with_outputs(backbone, kept), 'neck': [neck, *rest] if rest else neck}
    return Plan(result, remark)


def _fused(
    network: dict,
    backbone: ZooBackbone,
    old: Sequence[FeatureMap],
    alone: Optional[int],
    read: Optional[Sequence[bool]] = None,
) -> Plan:
    """For backbones that come up again to a fine map: maps by their strides, that of the prediction the deepest."""
    head = _list(network.get('decode_head'))[-1:]
    main = head[0].get('in_index', -1) if head else -1
    taken = _nearest(old, backbone.stages)
    if alone is not None or isinstance(main, int):
        taken[main if alone is None else alone] = len(backbone.stages) - 1
    kind = network['backbone'].get('type')
    said = f'{kind} holds a decoder of its own, which goes with it; the head reads the deepest stage (MapAdapter)'
    return adapted(network, backbone, old, taken, said, read, alone)


def plain(
    network: dict,
    backbone: ZooBackbone,
    old: Sequence[FeatureMap],
    size: tuple[int, int],
    read: Optional[Sequence[bool]] = None,
) -> Plan:
    """A plain backbone, one map of stride 16: for plain ones, before an FPN, else a pyramid of resized maps."""
    (single,) = backbone.stages
    neck = network.get('neck')
    if all(out.stride == single.stride for out in old):
        plan = rewired(network, backbone._replace(stages=(single,) * len(old)), old, range(len(old)), size)
        if len(old) > 1:
            depth = MODELS.get(backbone.cfg['type']).resolve_arch(backbone.cfg['arch'])['depths'][0]
            plan.network['backbone']['out_indices'] = tuple((i + 1) * depth // len(old) - 1 for i in range(len(old)))
        return plan
    # not PAFPN, NASFPN and the like, whose paths beyond FPN's are what they are chosen for
    if isinstance(neck, dict) and bare_name(neck.get('type')) == 'FPN' and neck.get('num_outs') in (4, 5):
        if not neck.get('start_level') and not neck.get('add_extra_convs') and old[0].stride == 4:
            pyramid = dict(
                type='SimpleFeaturePyramid',
                in_channels=single.channels,
                out_channels=neck['out_channels'],
                num_outs=neck['num_outs'],
            )
            return Plan({**network, 'backbone': with_outputs(backbone, ()), 'neck': pyramid})
    said = 'the maps of a pyramid are made of the one of the plain backbone (MapAdapter)'
    return adapted(network, backbone, old, [0] * len(old), said)


def classifier(
    network: dict,
    backbone: ZooBackbone,
    old: Sequence[FeatureMap],
    size: tuple[int, int],
    read: Optional[Sequence[bool]] = None,
) -> Plan:
    """Classifiers and self-supervised training: the last map, or all for a neck that fuses them."""
    necks, head = _list(network.get('neck')), network.get('head')
    pool = dict(type='GlobalAveragePooling')
    gives_tokens, remark = old[-1].stride is None, ''
    stages = [len(backbone.stages) - 1]
    if len(old) > 1 and not backbone.plain:
        fuses = any(isinstance(neck.get('in_channels'), (list, tuple)) for neck in necks)
        found = assign_stages(old, backbone.stages, deepest_last=True) if fuses else None
        stages = stages if found is None else list(found)
    old = old if len(stages) > 1 else old[-1:]
    new = [backbone.stages[i] for i in stages]
    cfg = with_outputs(backbone, stages)
    pools = bool(necks) and bare_name(necks[0].get('type')).endswith('GlobalAveragePooling')
    if backbone.plain and (gives_tokens or pools):  # its class token, which nothing has to pool
        cfg['out_type'] = 'cls_token'
        necks = necks[1:] if pools else necks
        new = [FeatureMap(new[0].channels, None)]
    elif gives_tokens and not necks:
        necks, remark = [pool], 'the head read tokens; the mean of the last map takes their place'
    elif gives_tokens and necks[0].get('with_avg_pool') is False:  # of self-supervised training
        necks = [{**necks[0], 'with_avg_pool': True}, *necks[1:]]
        remark = f'{necks[0]["type"]} read tokens; the mean of the last map takes their place'
    rewired_necks = [Wiring(old, new)(neck) for neck in necks]
    result = {**network, 'backbone': cfg, 'neck': rewired_necks}
    before, after = through(network.get('neck'), old, size), through(rewired_necks, new, size)
    wiring = Wiring(before, after) if before and after and len(before) == len(after) else Wiring(old, new)
    if head:
        result['head'] = wiring(head, 0, 'head')
        classes = head.get('num_classes') if isinstance(head, dict) else None
        if (
            classes
            and after
            and after[-1].stride
            and through(result['head'], after, size) != [FeatureMap(classes, None)]
        ):
            result['neck'] = [*rewired_necks, pool]  # it scores vectors only
    if not isinstance(network.get('neck'), (list, tuple)):
        result['neck'] = result['neck'][0] if len(result['neck']) == 1 else result['neck'] or None
    return Plan(result, remark)


def linear(network: dict, backbone: ZooBackbone, read: Optional[Sequence[bool]] = None) -> Plan:
    """Global average and a linear classifier, for heads that read what only their backbone gives."""
    head, deepest = network['head'], backbone.stages[-1]
    classes = head.get('num_classes', network['backbone'].get('num_classes'))
    made = dict(type='LinearClsHead', num_classes=classes, in_channels=deepest.channels)
    made.update({key: head[key] for key in ('loss', 'topk', 'cal_acc') if key in head})
    said = f'{head.get("type")} reads what only its backbone gives; global average and LinearClsHead take its place'
    cfg = with_outputs(backbone, [len(backbone.stages) - 1])
    return Plan({**network, 'backbone': cfg, 'neck': dict(type='GlobalAveragePooling'), 'head': made}, said)
