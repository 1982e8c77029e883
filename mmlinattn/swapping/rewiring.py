# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ways to wire another backbone into a model's config.

Which key of which neck or head reads the backbone is nowhere written down, so the ways are tried in order, the plainest
first (:mod:`.trial`). All of them rest on one comparison: a value under a key such as ``in_channels`` that equals the
channels of the upstream backbone's maps, or a list of them, becomes the channels of the new backbone's maps.
"""

import copy
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from ..utils.registering import bare_name
from .zoo import FeatureMap, ZooBackbone

_CHANNELS = re.compile(r'(^|_)(in_channels(_list)?|in_planes|inplanes)$')
_STRIDES = ('strides', 'feature_strides', 'featmap_strides', 'in_strides')
_NOT_WIRED = ('backbone', 'train_cfg', 'test_cfg', 'data_preprocessor')
_ALSO_BACKBONES = ('teacher_backbone', 'teacher_neck', 'teacher_bbox_head', 'teacher')


class Plan(NamedTuple):
    """One way.

    Attributes:
        network: The config of the network with backbone, rewired.
        remark: What is to be said of it beyond the changed values; '' for nothing.
        wiring: How it came about, to be narrowed to the maps that are read; None where there is nothing to narrow.
    """

    network: dict
    remark: str
    wiring: Optional['Wiring']


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

    def cost(chosen: tuple[int, ...]) -> float:
        return sum(abs(math.log2((out.stride or 32) / (stages[i].stride or 32))) for out, i in zip(old, chosen))

    choices = list(itertools.combinations(range(len(stages)), len(old)))
    if deepest_last:
        choices = [chosen for chosen in choices if chosen[-1] == len(stages) - 1]
    # of equally good ones the deeper
    return min(reversed(choices), key=cost) if choices else None


class Wiring:
    """Rewrites the parts of a config that read the backbone.

    Args:
        old: The upstream maps, by position.
        new: What takes the place of each.
        keep: Positions that are read, ascending; the others are no longer returned. None for all.
        ints_below: Depth of nested dicts down to which a single number without ``in_index`` is taken for channels of
            the backbone; None for any.
    """

    def __init__(
        self,
        old: Sequence[FeatureMap],
        new: Sequence[FeatureMap],
        keep: Optional[Sequence[int]] = None,
        ints_below: Optional[int] = None,
    ):
        self.old, self.new = list(old), list(new)
        self.keep = list(range(len(old))) if keep is None else list(keep)
        self.ints_below = ints_below
        self.matched = False  # whether any value was about the backbone
        self.recipe: dict[str, Any] = {}  # the arguments of :func:`direct` that made it

    def __call__(self, node: Any, depth: int = 0, parent: str = '') -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)(self(item, depth, parent) for item in node)
        if not isinstance(node, dict):
            return node
        out = {}
        for key, value in node.items():
            if _CHANNELS.search(key) and _is_numbers(value):
                out[key] = self._channels(key, value, node.get('in_index'), depth)
            elif key == 'out_channels' and 'roi_extractor' in parent and isinstance(value, int):
                out[key] = self._channels(key, value, None, depth)
            elif key == 'in_index' and value is not None:
                out[key] = self._index(value)
            elif key in _STRIDES and _is_numbers(value):
                out[key] = self._strides(value)
            elif key in ('start_level', 'end_level') and isinstance(value, int) and value > 0:
                out[key] = value - sum(position not in self.keep for position in range(value))
            else:
                out[key] = value if key in _NOT_WIRED else self(value, depth + 1, key)
        return out

    def _channels(self, key: str, value, index, depth: int):
        found = self._translated(key, value, index, depth)
        self.matched = self.matched or found is not None
        return value if found is None else found

    def _translated(self, key: str, value, index, depth: int):
        """The new channels; None where the value is not about the backbone."""
        old = [out.channels for out in self.old]
        new = [out.channels for out in self.new]
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
        if self.ints_below is not None and depth > self.ints_below:
            return None
        found = [i for i in self.keep if old[i] == value]
        if found:
            return new[found[-1]]
        return sum(new[i] for i in self.keep) if len(old) > 1 and value == sum(old) else None

    def _index(self, value):
        count = len(self.old)
        places = {position: place for place, position in enumerate(self.keep)}
        if isinstance(value, (list, tuple)):
            return type(value)(places.get(i % count, i) if -count <= i < count else i for i in value)
        if not -count <= value < count:  # of a map that only the neck makes
            return value
        place = places.get(value % count, value)
        return value if value < 0 and place == len(self.keep) - 1 else place

    def _strides(self, value):
        values = list(value)
        if values == [out.stride for out in self.old]:
            return type(value)(self.new[i].stride for i in self.keep)
        return value


def _is_numbers(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return all(type(item) is int for item in value) if is_list else type(value) is int


def plans(
    network: dict, old: list[FeatureMap], backbone: ZooBackbone, task: str, alone: Optional[int] = None
) -> Iterator[Plan]:
    """Ways to put a backbone into a network, the plainest first.

    Args:
        network: Its config, with ``backbone`` and perhaps ``neck``.
        old: The maps of its backbone.
        backbone: What is put in.
        task: ``mmdet``, ``mmseg`` or ``mmpretrain``.
        alone: Position of the map that the upstream backbone gives alone in inference; None for all.
    """
    network = copy.deepcopy(network)
    if task == 'mmpretrain':
        yield from _classifier_plans(network, old, backbone)
        return
    if not all(out.stride for out in old):
        return
    if alone is not None:
        yield _fused(network, backbone, old, alone)
        return
    if backbone.plain:
        yield from _plain_plans(network, old, backbone)
        return
    chosen = assign_stages(old, backbone.stages, deepest_last=task == 'mmseg')
    is_plain = len(old) > 1 and len({out.stride for out in old}) == 1
    if chosen is not None:
        new = [backbone.stages[i] for i in chosen]
        if is_plain and network.get('neck'):
            yield from _without_neck(network, backbone)
        if task == 'mmdet' and any(out.stride != stage.stride for out, stage in zip(old, new)):
            # anchors and points lie by the strides that upstream's maps had; in segmentors all is resized anyway
            strides = ' '.join(str(out.stride) for out in old)
            said = f'the head counts on maps of strides {strides}: those that {backbone.name} lacks are resized ones'
            yield _by_strides(network, backbone, old, None, f'{said} (MapAdapter)')
            return
        for wiring in (
            dict(where='neck'),
            dict(where='auxiliary'),
            dict(where='both'),
            dict(where='heads'),
            dict(where='heads', ints_below=1),
            dict(where='heads', ints_below=0),
        ):
            plan = direct(network, backbone, chosen, old, new, **wiring)
            if plan is not None:
                yield plan
        for resize in (False, True):
            yield _adapted(network, backbone, chosen, old, resize)
        return
    yield _fused(network, backbone, old)


def direct(
    network: dict,
    backbone: ZooBackbone,
    chosen: Sequence[int],
    old: Sequence[FeatureMap],
    new: Sequence[FeatureMap],
    where: str,
    ints_below: Optional[int] = None,
    keep: Optional[Sequence[int]] = None,
) -> Optional[Plan]:
    """Change the values that name the backbone's maps.

    Args:
        where: ``'neck'``, ``'heads'`` (all but the neck), ``'both'``, or ``'auxiliary'``: the neck, and auxiliary heads
            that read what it lets through.
        keep: Positions of ``old`` that are read; None for all.

    Returns:
        None where the network has no such part, or names no map.
    """
    neck = network.get('neck')
    if (where == 'heads') == bool(neck):
        return None
    keep = list(range(len(old))) if keep is None else list(keep)
    wiring = Wiring(old, new, keep, ints_below)
    wiring.recipe = dict(where=where, ints_below=ints_below, chosen=tuple(chosen))
    result = {**network, 'backbone': with_outputs(backbone, [chosen[i] for i in keep])}
    if where != 'heads':
        result['neck'] = [wiring(neck[0]), *neck[1:]] if isinstance(neck, (list, tuple)) else wiring(neck)
    if where == 'auxiliary' and not network.get('auxiliary_head'):
        return None
    for key, value in network.items() if where != 'neck' else ():
        if key in (*_NOT_WIRED, *_ALSO_BACKBONES, 'neck') or (where == 'auxiliary' and key != 'auxiliary_head'):
            continue
        result[key] = wiring(value, 0, key)
    return Plan(result, '', wiring)


def with_outputs(backbone: ZooBackbone, stages: Sequence[int]) -> dict:
    """The backbone's config with these outputs; all four are what it does unasked."""
    cfg = copy.deepcopy(backbone.cfg)
    if backbone.plain:
        return {**cfg, 'out_type': 'featmap'}
    if list(stages) != list(range(len(backbone.stages))):
        cfg['out_indices'] = tuple(stages)
    return cfg


def adapter(sources: Sequence[FeatureMap], old: Sequence[FeatureMap], taken: Sequence[int], resize: bool) -> dict:
    """A :class:`~mmlinattn.necks.MapAdapter`: maps like ``old``, ``old[i]`` made of ``sources[taken[i]]``."""
    cfg = dict(
        type='MapAdapter',
        in_channels=[source.channels for source in sources],
        out_channels=[out.channels for out in old],
    )
    if list(taken) != list(range(len(old))):
        cfg['sources'] = list(taken)
    scales = [(sources[i].stride or 32) / (out.stride or 32) for i, out in zip(taken, old)]
    if resize and any(scale != 1 for scale in scales):
        cfg['scales'] = scales
    return cfg


def _with_first_neck(network: dict, first: dict) -> dict:
    neck = network.get('neck')
    rest = list(neck) if isinstance(neck, (list, tuple)) else [neck] if neck else []
    return {**network, 'neck': [first, *rest] if rest else first}


def _adapted(
    network: dict,
    backbone: ZooBackbone,
    chosen: Sequence[int],
    old: Sequence[FeatureMap],
    resize: bool,
) -> Plan:
    first = adapter([backbone.stages[i] for i in chosen], old, range(len(old)), resize)
    result = _with_first_neck({**network, 'backbone': with_outputs(backbone, chosen)}, first)
    fixed = 'widths and strides' if 'scales' in first else 'widths'
    return Plan(result, f'what follows takes maps of fixed {fixed} only: 1x1 convolutions (MapAdapter) make them', None)


def _fused(network: dict, backbone: ZooBackbone, old: Sequence[FeatureMap], alone: Optional[int] = None) -> Plan:
    """For backbones that come up again to a fine map: maps by their strides, that of the prediction the deepest."""
    head = network.get('decode_head')
    head = head[-1] if isinstance(head, (list, tuple)) else head
    main = head.get('in_index', -1) if isinstance(head, dict) else -1
    main = main % len(old) if isinstance(main, int) else None
    main = main if alone is None else alone
    kind = network['backbone'].get('type')
    said = f'{kind} holds a decoder of its own, which goes with it; the head reads the deepest stage (MapAdapter)'
    plan = _by_strides(network, backbone, old, main, said)
    if alone is not None:
        neck = plan.network['neck']
        (neck[0] if isinstance(neck, list) else neck)['inference_output'] = alone
    return plan


def _by_strides(
    network: dict, backbone: ZooBackbone, old: Sequence[FeatureMap], deepest: Optional[int], said: str
) -> Plan:
    """Each upstream map made of the stage with the nearest stride and resized to its own; ``deepest``: position of the
    one that is made of the last stage whatever its stride."""
    stages = backbone.stages
    taken = []
    for position, out in enumerate(old):
        nearest = min(range(len(stages)), key=lambda i: abs(math.log2((out.stride or 32) / (stages[i].stride or 32))))
        taken.append(len(stages) - 1 if position == deepest else nearest)
    used = sorted(set(taken))
    first = adapter([stages[i] for i in used], old, [used.index(i) for i in taken], resize=True)
    return Plan(_with_first_neck({**network, 'backbone': with_outputs(backbone, used)}, first), said, None)


def without_unread(plan: Plan, read: Sequence[bool]) -> Optional[Plan]:
    """A plan with a :class:`~mmlinattn.necks.MapAdapter`, without the maps of the backbone that are not read."""
    network = copy.deepcopy(plan.network)
    neck = network['neck']
    cfg = neck[0] if isinstance(neck, list) else neck
    backbone = network['backbone']
    if not isinstance(cfg, dict) or cfg.get('type') != 'MapAdapter' or len(read) != len(cfg['in_channels']):
        return None
    places = {i: place for place, i in enumerate(i for i, is_read in enumerate(read) if is_read)}
    cfg['sources'] = [places.get(i) for i in cfg.get('sources', range(len(cfg['out_channels'])))]
    cfg['in_channels'] = [cfg['in_channels'][i] for i in places]
    stages = backbone.get('out_indices', tuple(range(len(read))))
    backbone['out_indices'] = tuple(stages[i] for i in places)
    return plan._replace(network=network)


def _without_neck(network: dict, backbone: ZooBackbone) -> Iterator[Plan]:
    """Upstream's backbone is plain and its neck makes the pyramid, which is here already."""
    neck = network['neck']
    if not isinstance(neck, dict):
        return
    width = neck.get('out_channels', neck.get('embed_dim'))
    if not isinstance(width, int):
        return
    pyramid = [FeatureMap(width, stage.stride) for stage in backbone.stages]
    chosen = tuple(range(len(pyramid)))
    plan = direct({**network, 'neck': None}, backbone, chosen, pyramid, backbone.stages, 'heads')
    if plan is not None and plan.wiring is not None and plan.wiring.matched:
        yield plan._replace(remark=f'{neck.get("type")} made a pyramid of plain maps; the backbone is one itself')


def _plain_plans(network: dict, old: Sequence[FeatureMap], backbone: ZooBackbone) -> Iterator[Plan]:
    """A plain backbone: one map of stride 16."""
    (single,) = backbone.stages
    neck = network.get('neck')
    if all(out.stride == single.stride for out in old):
        for where in ('neck', 'both', 'heads'):
            plan = direct(network, backbone, (0,) * len(old), old, [single] * len(old), where)
            if plan is not None:
                if len(old) > 1:
                    plan.network['backbone']['out_indices'] = _even_blocks(backbone, len(old))
                yield plan
    # not PAFPN, NASFPN and the like, whose paths beyond FPN's are what they are chosen for
    if isinstance(neck, dict) and bare_name(neck.get('type')) == 'FPN' and neck.get('num_outs') in (4, 5):
        starts_at = neck.get('start_level', 0)
        extra = neck.get('add_extra_convs')
        if isinstance(neck.get('out_channels'), int) and not starts_at and not extra and old[0].stride == 4:
            pyramid = dict(
                type='SimpleFeaturePyramid',
                in_channels=single.channels,
                out_channels=neck['out_channels'],
                num_outs=neck['num_outs'],
            )
            yield Plan({**network, 'backbone': with_outputs(backbone, ()), 'neck': pyramid}, '', None)
    first = adapter([single], old, [0] * len(old), resize=True)
    result = _with_first_neck({**network, 'backbone': with_outputs(backbone, ())}, first)
    yield Plan(result, 'the maps of a pyramid are made of the one of the plain backbone (MapAdapter)', None)


def _even_blocks(backbone: ZooBackbone, count: int) -> tuple[int, ...]:
    from mmengine.registry import MODELS

    depth = MODELS.get(backbone.cfg['type']).resolve_arch(backbone.cfg['arch'])['depths'][0]
    return tuple((i + 1) * depth // count - 1 for i in range(count))


def _classifier_plans(network: dict, old: Sequence[FeatureMap], backbone: ZooBackbone) -> Iterator[Plan]:
    """Classifiers and self-supervised training: the last map, or all for a neck that fuses them."""
    last = len(backbone.stages) - 1
    pool = dict(type='GlobalAveragePooling')
    deepest = backbone.stages[last]
    results: list[tuple[dict, list, list, list[int], str]] = []
    if len(old) > 1 and all(out.stride for out in old) and not backbone.plain:
        stages = assign_stages(old, backbone.stages, deepest_last=True)
        if stages is not None:
            maps = [backbone.stages[i] for i in stages]
            results.append(({**network, 'backbone': with_outputs(backbone, stages)}, list(old), maps, list(stages), ''))
    single = {**network, 'backbone': with_outputs(backbone, [last])}
    tokens = {**network, 'backbone': {**copy.deepcopy(backbone.cfg), 'out_type': 'cls_token'}}
    gives_tokens = old[-1].stride is None
    neck_kind = str((network.get('neck') or {}).get('type')) if not isinstance(network.get('neck'), list) else ''
    if backbone.plain and (gives_tokens or neck_kind.endswith('GlobalAveragePooling')):
        kept = None if neck_kind.endswith('GlobalAveragePooling') else network.get('neck')
        results.append(({**tokens, 'neck': kept}, [old[-1]], [deepest], [last], ''))
    if not gives_tokens:
        results.append((single, [old[-1]], [deepest], [last], ''))
    if not network.get('neck'):
        said = 'the head read tokens; the mean of the last map takes their place' if gives_tokens else ''
        results.append(({**single, 'neck': pool}, [old[-1]], [deepest], [last], said))
    neck = network.get('neck')
    if gives_tokens and isinstance(neck, dict) and neck.get('with_avg_pool') is False:  # of self-supervised training
        said = f'{neck["type"]} read tokens; the mean of the last map takes their place'
        results.append(({**single, 'neck': {**neck, 'with_avg_pool': True}}, [old[-1]], [deepest], [last], said))
    for result, before, new, chosen, remark in results:
        for parts in (('neck', 'head'), ('neck',), ('head',)):
            wiring = Wiring(before, new)
            wiring.recipe = dict(where='classifier', parts=parts, chosen=tuple(chosen))
            rewired = dict(result)
            for key in parts:
                if rewired.get(key):
                    rewired[key] = wiring(rewired[key], 0, key)
            if wiring.matched:
                yield Plan(rewired, remark, wiring if len(before) > 1 else None)
    head = network.get('head')
    if not isinstance(head, dict):
        return
    classes = head.get('num_classes')
    if classes is None and head.get('type') == 'ClsHead':  # a loss; the backbone holds the classifier (LeNet, VGG)
        classes = network['backbone'].get('num_classes')
    if isinstance(classes, int):
        linear = dict(type='LinearClsHead', num_classes=classes, in_channels=deepest.channels)
        linear.update({key: head[key] for key in ('loss', 'topk', 'cal_acc') if key in head})
        said = f'{head.get("type")} reads what only its backbone gives; global average and LinearClsHead take its place'
        yield Plan({**single, 'neck': pool, 'head': linear}, said, None)
