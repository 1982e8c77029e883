# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Upstream networks with another backbone, by reading.

The first candidate is wired: necks and heads get the channels of the new maps (:class:`~.wiring.Wiring`). If its smoke
test fails, a second one is tried, for families that do not name the channels they read:

- detectors and segmentors get upstream's channels by a ``MapAdapter``: C4 R-CNN, NAS-FCOS, SSD, CGNet, LR-ASPP,
  SETR-MLA;
- classifiers get a linear head: Conformer, EfficientFormer, LeViT.
"""

from typing import Any, NamedTuple, Optional

from ...utils.registering import bare_name
from .measuring import Measured, run_necks
from .upstream import listed
from .wiring import Wiring, assign_stages, nearest_stages, positions_read
from .zoo import FeatureMap, ZooBackbone

_POOL = dict(type='GlobalAveragePooling')


class Candidate(NamedTuple):
    """Config of a model with the new backbone, and a note for the user beside the list of changed values."""

    network: dict
    remark: str = ''


def candidates(network: dict, measured: Measured, new: ZooBackbone, task: str) -> list[Candidate]:
    """Return the networks to try, in order: necks and heads adapted to the new backbone's maps.

    The list is empty if upstream's maps have no stride.
    """
    old, necks, size = measured.maps, listed(network.get('neck')), measured.size
    if task == 'mmpretrain':
        return _for_classifiers(network, measured, new)
    if not all(out.stride for out in old):
        return []
    if new.plain:
        return [_for_plain(network, measured, new)]
    chosen = assign_stages(old, new.stages, deepest_last=task == 'mmseg')
    if measured.alone is not None or chosen is None:  # it upsamples again: the prediction is of the deepest stage
        heads = listed(network.get('decode_head'))
        main = heads[-1].get('in_index', -1) if heads else -1
        main = main if measured.alone is None else measured.alone
        chosen = nearest_stages(old, new.stages)
        if isinstance(main, int):
            chosen[main] = len(new.stages) - 1
        remark = f'{network["backbone"].get("type")} includes a decoder: the head reads the deepest stage (MapAdapter)'
        return [_adapted(network, measured, new, chosen, remark)]
    if task == 'mmdet' and any(out.stride != new.stages[i].stride for out, i in zip(old, chosen)):
        # anchors and points lie by the strides of upstream's maps; in segmentors all is resized anyway
        remark = f'the head needs strides {" ".join(str(out.stride) for out in old)}: MapAdapter resizes the maps'
        return [_adapted(network, measured, new, nearest_stages(old, new.stages), remark)]
    remark = 'the network needs fixed widths: MapAdapter makes them by 1x1 convolutions'
    adapted = _adapted(network, measured, new, chosen, remark)
    if task == 'mmseg' and len(old) > 1 and len({out.stride for out in old}) == 1 and necks:
        made = run_necks(necks, old, size)
        if made and assign_stages(made, new.stages, True) == list(range(len(made))):
            remark = f'{bare_name(necks[0].get("type"))} made a pyramid of plain maps; the backbone is one itself'
            wired = _wired({**network, 'neck': None}, made, size, new, list(range(len(made))))
            return [Candidate(wired, remark), adapted]
    return [Candidate(_wired(network, old, size, new, chosen)), adapted]


def _for_plain(network: dict, measured: Measured, new: ZooBackbone) -> Candidate:
    """Replace the backbone by one with a single map of stride 16, used once or resampled to a pyramid."""
    old, (single,), neck = measured.maps, new.stages, network.get('neck')
    if all(out.stride == single.stride for out in old):
        several = new._replace(stages=new.stages * len(old))
        return Candidate(_wired(network, old, measured.size, several, list(range(len(old)))))
    # not PAFPN or NASFPN, chosen for their paths beyond FPN's
    fpn = neck if isinstance(neck, dict) and bare_name(neck.get('type')) == 'FPN' else {}
    starts_at_4 = old[0].stride == 4 and not fpn.get('start_level') and not fpn.get('add_extra_convs')
    if starts_at_4 and fpn.get('num_outs') in (4, 5):
        sizes = dict(in_channels=single.channels, out_channels=fpn['out_channels'], num_outs=fpn['num_outs'])
        pyramid = dict(type='SimpleFeaturePyramid', **sizes)
        return Candidate({**network, 'backbone': new.with_outputs([0]), 'neck': pyramid})
    return _adapted(network, measured, new, [0] * len(old), 'MapAdapter makes a pyramid of the map of stride 16')


def _wired(network: dict, old: list[FeatureMap], size: tuple[int, int], new: ZooBackbone, chosen: list[int]) -> dict:
    """Return the network whose necks and heads read stage ``chosen[i]`` of the new backbone in place of map i."""
    keep, necks = positions_read(network, len(old)), listed(network.get('neck'))
    maps, result = [new.stages[i] for i in chosen], {**network, 'backbone': new.with_outputs([chosen[i] for i in keep])}
    wiring: Optional[Wiring] = Wiring(old, maps, keep, deep=len(old) == 1 or bool(necks))
    if necks and wiring:
        made = [wiring(necks[0]), *necks[1:]]
        result['neck'] = made if isinstance(network['neck'], (list, tuple)) else made[0]
        wiring = _behind(necks, old, made, [maps[i] for i in keep], size)
    return wiring.heads(result) if wiring else result


def _behind(
    necks: list, old: list[FeatureMap], made: list, new: list[FeatureMap], size: tuple[int, int]
) -> Optional[Wiring]:
    """Compare the outputs of the necks on noise for the old and the new backbone, and return the wiring of the heads.

    None: the necks fail on noise.
    """
    before, after = run_necks(necks, old, size), run_necks(made, new, size)
    return Wiring(before, after) if before and after and len(before) == len(after) else None


def _adapted(network: dict, measured: Measured, new: ZooBackbone, sources: list[int], remark: str) -> Candidate:
    """Return the candidate with a ``MapAdapter`` after the new backbone, which keeps channels and strides.

    Map i of the adapter is made from stage ``sources[i]``.
    """
    old = measured.maps
    # heads of networks with branches read all of them in training
    read = positions_read(network, len(old)) if measured.alone is None else range(len(old))
    kept = sorted({sources[i] for i in read})
    inputs = [kept.index(stage) if stage in kept else None for stage in sources]
    scales = [(new.stages[i].stride or 32) / (out.stride or 32) for i, out in zip(sources, old)]
    neck: dict[str, Any] = dict(type='MapAdapter', in_channels=[new.stages[i].channels for i in kept])
    neck['out_channels'] = [out.channels for out in old]
    if inputs != list(range(len(old))):
        neck['sources'] = inputs
    if any(scale != 1 for scale in scales):
        neck['scales'] = scales
    if measured.alone is not None:
        neck['inference_output'] = measured.alone
    necks = [neck, *listed(network.get('neck'))]
    return Candidate({**network, 'backbone': new.with_outputs(kept), 'neck': necks if len(necks) > 1 else neck}, remark)


def _for_classifiers(network: dict, measured: Measured, backbone: ZooBackbone) -> list[Candidate]:
    """Return candidates that read the last map, or all maps if the neck fuses several."""
    necks, old, last, remark = listed(network.get('neck')), measured.maps, len(backbone.stages) - 1, ''
    stages = [last]
    if len(old) > 1 and not backbone.plain and any(isinstance(n.get('in_channels'), (list, tuple)) for n in necks):
        stages = assign_stages(old, backbone.stages, deepest_last=True) or stages
    old = old if len(stages) > 1 else old[-1:]
    new, cfg, made = [backbone.stages[i] for i in stages], backbone.with_outputs(stages), necks
    pools = bool(necks) and bare_name(necks[0].get('type')).endswith('GlobalAveragePooling')
    if backbone.plain and (old[-1].stride is None or pools):  # its class token, without pooling
        cfg['out_type'], made, new = 'cls_token', necks[pools:], [FeatureMap(new[0].channels, None)]
    elif old[-1].stride is None and necks and necks[0].get('with_avg_pool') is False:  # of self-supervised training
        made = [{**necks[0], 'with_avg_pool': True}, *necks[1:]]
        remark = f'{necks[0]["type"]} averages the last map in place of tokens'
    made = [Wiring(old, new)(neck) for neck in made]
    wiring = _behind(necks, old, made, new, measured.size)
    if wiring and wiring.old_strides[-1] is None and wiring.new_strides[-1]:
        made, remark = [*made, _POOL], 'the head reads vectors: GlobalAveragePooling makes them'
    is_list = isinstance(network.get('neck'), (list, tuple)) or len(made) > 1
    result = {**network, 'backbone': cfg, 'neck': made if is_list else made[0] if made else None}
    head = network.get('head')
    if not head:
        return [Candidate(result, remark)]
    found = [Candidate({**result, 'head': (wiring or Wiring(old, new))(head, 0, 'head')}, remark)]
    classes = head.get('num_classes')
    if not classes and network['backbone'].get('num_classes'):  # the head is a loss alone (LeNet, VGG)
        classes, found = network['backbone']['num_classes'], []
    if classes:
        linear = dict(type='LinearClsHead', num_classes=classes, in_channels=backbone.stages[last].channels)
        linear.update({key: head[key] for key in ('loss', 'topk', 'cal_acc') if key in head})
        remark = f'LinearClsHead on the last map replaces {head.get("type")}'
        result.update(backbone=backbone.with_outputs([last]), neck=_POOL, head=linear)
        found.append(Candidate(result, remark))
    return found
