# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ways to put another backbone into the config of a network, the best first; a training step decides between them.

Necks and heads say the new channels where they say any (:class:`~.wiring.Wiring`). What says nothing of the maps it
reads gets maps of upstream's widths and strides from a :class:`~mmlinattn.necks.MapAdapter`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, Optional

from ...utils.registering import bare_name
from .measuring import Measured, through
from .wiring import NO_READER, Wiring, assign_stages, nearest_stages
from .zoo import FeatureMap, ZooBackbone

_TEACHERS = ('teacher_backbone', 'teacher_neck', 'teacher_bbox_head', 'teacher')
_POOL = dict(type='GlobalAveragePooling')
Read = Optional[Sequence[bool]]


class Plan(NamedTuple):
    """A network with another backbone, and a remark beyond the changed values."""

    network: dict
    remark: str = ''


# Makes a plan; with ``read``, which of the backbone's maps are read by position, one that returns only those.
Way = Callable[..., Plan]


def ways(network: dict, measured: Measured, backbone: ZooBackbone, task: str) -> list[Way]:
    """How a backbone goes into a network whose backbone gives the measured maps: none where these have no stride."""
    here = _Place(network, measured.maps, measured.size, backbone)
    if task == 'mmpretrain':
        return here.for_classifiers()
    if not all(out.stride for out in here.old):
        return []
    return here.for_plain() if backbone.plain else here.for_pyramids(measured.alone, task)


class _Place(NamedTuple):
    """A network, the maps that its backbone gives at an image ``size``, and the new backbone."""

    network: dict
    old: Sequence[FeatureMap]
    size: tuple[int, int]
    new: ZooBackbone

    @property
    def necks(self) -> list:
        neck = self.network.get('neck')
        return list(neck) if isinstance(neck, (list, tuple)) else [neck] if neck else []

    def for_pyramids(self, alone: Optional[int], task: str) -> list[Way]:
        """In detectors and segmentors; ``alone`` is the position of the one map given in inference."""
        old, stages, kind = self.old, self.new.stages, self.network['backbone'].get('type')
        chosen = assign_stages(old, stages, deepest_last=task == 'mmseg')
        if alone is not None or chosen is None:  # it upsamples again: the prediction is of the deepest stage
            head = self.network.get('decode_head')
            head = head[-1] if isinstance(head, (list, tuple)) else head or {}
            main = head.get('in_index', -1) if alone is None else alone
            taken = nearest_stages(old, stages)
            if isinstance(main, int):
                taken[main] = len(stages) - 1
            said = (
                f'{kind} holds a decoder of its own, which goes with it; the head reads the deepest stage (MapAdapter)'
            )
            return [partial(self.adapted, taken, said, alone=alone)]
        if task == 'mmdet' and any(out.stride != stages[i].stride for out, i in zip(old, chosen)):
            # anchors and points lie by the strides that upstream's maps had; in segmentors all is resized anyway
            strides = ' '.join(str(out.stride) for out in old)
            said = f'the head counts on maps of strides {strides}: those that {self.new.name} lacks are resized ones'
            return [partial(self.adapted, nearest_stages(old, stages), f'{said} (MapAdapter)')]
        said = 'what follows takes maps of fixed widths and strides only: 1x1 convolutions (MapAdapter) make them'
        adapting = partial(self.adapted, chosen, said)
        if task == 'mmseg' and len(old) > 1 and len({out.stride for out in old}) == 1 and self.necks:
            pyramid = through(self.necks, old, self.size)
            if pyramid and assign_stages(pyramid, stages, True) == tuple(range(len(pyramid))):
                said = (
                    f'{bare_name(self.necks[0].get("type"))} made a pyramid of plain maps; the backbone is one itself'
                )
                bare = self._replace(network={**self.network, 'neck': None}, old=pyramid)
                return [partial(bare.rewired, range(len(pyramid)), said), adapting]
        return [partial(self.rewired, chosen), adapting]

    def for_plain(self) -> list[Way]:
        """One map of stride 16: in place of plain ones, before an FPN, else as a pyramid of resized maps."""
        (single,), neck = self.new.stages, self.network.get('neck')
        if all(out.stride == single.stride for out in self.old):
            parts = self._replace(new=self.new._replace(stages=(single,) * len(self.old)))
            return [partial(parts.rewired, range(len(self.old)))]
        # not PAFPN, NASFPN and the like, which are chosen for their paths beyond FPN's
        fpn = neck if isinstance(neck, dict) and bare_name(neck.get('type')) == 'FPN' else {}
        starts_at_4 = self.old[0].stride == 4 and not fpn.get('start_level') and not fpn.get('add_extra_convs')
        if starts_at_4 and fpn.get('num_outs') in (4, 5):
            sizes = dict(in_channels=single.channels, out_channels=fpn['out_channels'], num_outs=fpn['num_outs'])
            pyramid = dict(type='SimpleFeaturePyramid', **sizes)
            plan = Plan({**self.network, 'backbone': self.new.with_outputs([0]), 'neck': pyramid})
            return [lambda read=None: plan]
        said = 'the maps of a pyramid are made of the one of the plain backbone (MapAdapter)'
        return [partial(self.adapted, [0] * len(self.old), said)]

    def for_classifiers(self) -> list[Way]:
        """In classifiers and self-supervised training."""
        head = self.network.get('head')
        # of a head that is a loss alone, the backbone holds the classifier (LeNet, VGG)
        classes = head.get('num_classes', self.network['backbone'].get('num_classes')) if isinstance(head, dict) else 0
        ways: list[Way] = [self.classifier, partial(self.classifier, pooled=True)]
        return [*ways, partial(self.linear, classes)] if isinstance(classes, int) and classes else ways

    def rewired(self, chosen: Sequence[int], remark: str = '', read: Read = None) -> Plan:
        """Follow the maps through the network: what reads the backbone says the new channels, and where a neck lets
        maps through (segmentors), so does what reads the neck. Stage ``chosen[i]`` takes the place of map i."""
        keep = [i for i in range(len(self.old)) if read is None or read[i]]
        new, necks = [self.new.stages[i] for i in chosen], self.necks
        wiring: Optional[Wiring] = Wiring(self.old, new, keep, deep=len(self.old) == 1 or bool(necks))
        result = {**self.network, 'backbone': self.new.with_outputs([chosen[i] for i in keep])}
        if necks and wiring:
            made = [wiring(necks[0]), *necks[1:]]
            result['neck'] = made if isinstance(self.network['neck'], (list, tuple)) else made[0]
            before, after = through(necks, self.old, self.size), through(made, [new[i] for i in keep], self.size)
            differ = before and after and [out.channels for out in before] != [out.channels for out in after]
            wiring = Wiring(before, after) if before and after and differ and len(before) == len(after) else None
        for key, value in self.network.items():
            if wiring and key not in (*NO_READER, *_TEACHERS):
                result[key] = wiring(value, 0, key)
        return Plan(result, remark)

    def adapted(self, taken: Sequence[int], remark: str, read: Read = None, alone: Optional[int] = None) -> Plan:
        """Maps like the upstream ones in channels and stride, ``old[i]`` made of stage ``taken[i]``; of the stages that
        are taken, ``read`` says which are read."""
        stages = self.new.stages
        kept = [stage for i, stage in enumerate(sorted(set(taken))) if read is None or read[i]]
        places = [kept.index(stage) if stage in kept else None for stage in taken]
        scales = [(stages[i].stride or 32) / (out.stride or 32) for i, out in zip(taken, self.old)]
        channels = [stages[i].channels for i in kept], [out.channels for out in self.old]
        neck: dict[str, Any] = dict(type='MapAdapter', in_channels=channels[0], out_channels=channels[1])
        if places != list(range(len(self.old))):
            neck['sources'] = places
        if any(scale != 1 for scale in scales):
            neck['scales'] = scales
        if alone is not None:
            neck['inference_output'] = alone
        necks = [neck, *self.necks] if self.necks else neck
        return Plan({**self.network, 'backbone': self.new.with_outputs(kept), 'neck': necks}, remark)

    def classifier(self, pooled: bool = False, read: Read = None) -> Plan:
        """The last map, or all for a neck that fuses them; ``pooled``, their means for a head that reads vectors."""
        necks, old, stages = self.necks, self.old, [len(self.new.stages) - 1]
        remark = ''
        if len(old) > 1 and not self.new.plain and any(isinstance(n.get('in_channels'), (list, tuple)) for n in necks):
            stages = list(assign_stages(old, self.new.stages, deepest_last=True) or stages)
        old = old if len(stages) > 1 else old[-1:]
        new, cfg = [self.new.stages[i] for i in stages], self.new.with_outputs(stages)
        gives_tokens = old[-1].stride is None
        pools = bool(necks) and bare_name(necks[0].get('type')).endswith('GlobalAveragePooling')
        if self.new.plain and (gives_tokens or pools):  # its class token, which nothing has to pool
            cfg['out_type'] = 'cls_token'
            necks = necks[1:] if pools else necks
            new = [FeatureMap(new[0].channels, None)]
        elif gives_tokens and necks and necks[0].get('with_avg_pool') is False:  # of self-supervised training
            necks = [{**necks[0], 'with_avg_pool': True}, *necks[1:]]
            remark = f'{necks[0]["type"]} read tokens; the mean of the last map takes their place'
        made = [Wiring(old, new)(neck) for neck in necks]
        before, after = through(self.necks, old, self.size), through(made, new, self.size)
        wiring = Wiring(before, after) if before and after and len(before) == len(after) else Wiring(old, new)
        result = {**self.network, 'backbone': cfg}
        if self.network.get('head'):
            result['head'] = wiring(self.network['head'], 0, 'head')
        if pooled:
            made, remark = [*made, _POOL], 'the head reads vectors; the mean of the last map is one'
        is_list = isinstance(self.network.get('neck'), (list, tuple)) or len(made) > 1
        result['neck'] = made if is_list else made[0] if made else None
        return Plan(result, remark)

    def linear(self, classes: int, read: Read = None) -> Plan:
        """Global average and a linear classifier, for heads that read what only their backbone gives."""
        head, last = self.network['head'], len(self.new.stages) - 1
        made = dict(type='LinearClsHead', num_classes=classes, in_channels=self.new.stages[last].channels)
        made.update({key: head[key] for key in ('loss', 'topk', 'cal_acc') if key in head})
        said = f'{head.get("type")} reads what only its backbone gives; global average and LinearClsHead take its place'
        return Plan({**self.network, 'backbone': self.new.with_outputs([last]), 'neck': _POOL, 'head': made}, said)
