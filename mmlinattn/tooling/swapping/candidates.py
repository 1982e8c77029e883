# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Derive configs with another backbone from an upstream config.

In the first candidate, necks and heads get the channels of the new feature maps (:class:`~.wiring.Wiring`). The second
one is for families with configs that do not name these channels. It is tried if the smoke test of the first one fails:

- Detectors and segmentors get upstream's channels by a ``MapAdapter``: C4 R-CNN, NAS-FCOS, SSD, CGNet, LR-ASPP,
  SETR-MLA.
- Classifiers get a linear head: Conformer, EfficientFormer, LeViT.
"""

from typing import Any, NamedTuple, Optional

from ...utils.registering import bare_name
from .measuring import Measured, run_necks
from .upstream import listed
from .wiring import Wiring, assign_stages, nearest_stages, positions_read
from .zoo import FeatureMap, ZooBackbone

_POOL = dict(type='GlobalAveragePooling')


class Candidate(NamedTuple):
    """Config of a model with the new backbone, and a note for the user ('' for none)."""

    network: dict
    remark: str = ''


def candidates(network: dict, measured: Measured, new: ZooBackbone, task: str) -> list[Candidate]:
    """Return the configs to try, in order, with necks and heads adapted to the new backbone.

    For detectors and segmentors the list is empty if an output of the old backbone is no feature map (a vector,
    tokens).

    Args:
        network (dict): Config of the upstream model around the backbone.
        measured (Measured): Feature maps of the upstream backbone.
        new (ZooBackbone): New backbone.
        task (str): ``'mmdet'``, ``'mmseg'`` or ``'mmpretrain'``.
    """
    old = measured.maps
    if task == 'mmpretrain':
        return _for_classifiers(network, measured, new)
    if not all(out.stride for out in old):
        return []
    if new.plain:
        return [_for_plain(network, measured, new)]
    chosen = assign_stages(old, new.stages, deepest_last=task == 'mmseg')
    if measured.alone is not None or chosen is None:  # strides that fall again: a decoder
        return [_for_decoder(network, measured, new)]
    if task == 'mmdet' and any(out.stride != new.stages[i].stride for out, i in zip(old, chosen)):
        # anchors and points depend on the strides; segmentors resize all feature maps
        strides = ' '.join(str(out.stride) for out in old)
        remark = f'the head needs strides {strides}: MapAdapter resizes the feature maps'
        return [_adapted(network, measured, new, nearest_stages(old, new.stages), remark)]
    remark = 'the network needs fixed channels: MapAdapter makes them by 1x1 convolutions'
    adapted = _adapted(network, measured, new, chosen, remark)
    without_neck = _without_pyramid_neck(network, measured, new) if task == 'mmseg' else None
    return [without_neck or Candidate(_wired(network, old, measured.size, new, chosen)), adapted]


def _for_decoder(network: dict, measured: Measured, new: ZooBackbone) -> Candidate:
    """Return the candidate for a backbone that includes a decoder: the prediction comes from the deepest stage."""
    heads = listed(network.get('decode_head'))
    main = measured.alone
    if main is None:
        main = heads[-1].get('in_index', -1) if heads else -1
    chosen = nearest_stages(measured.maps, new.stages)
    if isinstance(main, int):
        chosen[main] = len(new.stages) - 1
    remark = f'{network["backbone"].get("type")} includes a decoder: the head reads the deepest stage (MapAdapter)'
    return _adapted(network, measured, new, chosen, remark)


def _without_pyramid_neck(network: dict, measured: Measured, new: ZooBackbone) -> Optional[Candidate]:
    """Return the network without its neck if the neck makes a pyramid of feature maps of one stride; None otherwise."""
    necks, old = listed(network.get('neck')), measured.maps
    if not necks or len(old) == 1 or len({out.stride for out in old}) > 1:
        return None
    made = run_necks(necks, old, measured.size)
    if not made or assign_stages(made, new.stages, deepest_last=True) != list(range(len(made))):
        return None
    remark = f'{bare_name(necks[0].get("type"))} is left out: the backbone is a pyramid itself'
    return Candidate(_wired({**network, 'neck': None}, made, measured.size, new, list(range(len(made)))), remark)


def _for_plain(network: dict, measured: Measured, new: ZooBackbone) -> Candidate:
    """Return the candidate for a plain backbone, with all blocks at stride 16."""
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
    return _adapted(network, measured, new, [0] * len(old), 'MapAdapter makes a pyramid of the stride-16 feature map')


def _wired(network: dict, old: list[FeatureMap], size: tuple[int, int], new: ZooBackbone, chosen: list[int]) -> dict:
    """Return the config with necks and heads that read stage ``chosen[i]`` of the new backbone as feature map ``i``."""
    keep, necks = positions_read(network, len(old)), listed(network.get('neck'))
    maps, result = [new.stages[i] for i in chosen], {**network, 'backbone': new.with_outputs([chosen[i] for i in keep])}
    wiring: Optional[Wiring] = Wiring(old, maps, keep, deep=len(old) == 1 or bool(necks))
    if necks and wiring:
        made = [wiring(necks[0]), *necks[1:]]
        result['neck'] = made if isinstance(network['neck'], (list, tuple)) else made[0]
        wiring = _head_wiring(necks, old, made, [maps[i] for i in keep], size)
    return wiring.heads(result) if wiring else result


def _head_wiring(
    necks: list, old: list[FeatureMap], made: list, new: list[FeatureMap], size: tuple[int, int]
) -> Optional[Wiring]:
    """Return the wiring of the heads behind the rewritten necks ``made``; None if the necks fail on noise."""
    before, after = run_necks(necks, old, size), run_necks(made, new, size)
    return Wiring(before, after) if before and after and len(before) == len(after) else None


def _adapted(network: dict, measured: Measured, new: ZooBackbone, sources: list[int], remark: str) -> Candidate:
    """Return the candidate with a ``MapAdapter`` to upstream's channels and strides. Output ``i`` of the adapter comes
    from stage ``sources[i]`` of the new backbone."""
    old = measured.maps
    # heads of networks with branches read all of them in training
    read = positions_read(network, len(old)) if measured.alone is None else range(len(old))
    kept = sorted({sources[i] for i in read})
    inputs = [kept.index(stage) if stage in kept else None for stage in sources]
    scales = [(new.stages[i].stride or 32) / (out.stride or 32) for i, out in zip(sources, old)]
    channels = dict(in_channels=[new.stages[i].channels for i in kept], out_channels=[out.channels for out in old])
    neck: dict[str, Any] = dict(type='MapAdapter', **channels)
    if inputs != list(range(len(old))):
        neck['sources'] = inputs
    if any(scale != 1 for scale in scales):
        neck['scales'] = scales
    if measured.alone is not None:
        neck['inference_output'] = measured.alone
    necks = [neck, *listed(network.get('neck'))]
    return Candidate({**network, 'backbone': new.with_outputs(kept), 'neck': necks if len(necks) > 1 else neck}, remark)


def _for_classifiers(network: dict, measured: Measured, backbone: ZooBackbone) -> list[Candidate]:
    """Return candidates for a classifier that reads the last feature map, or all maps if its neck fuses several."""
    necks, old, remark = listed(network.get('neck')), measured.maps, ''
    stages = [len(backbone.stages) - 1]
    if len(old) > 1 and not backbone.plain and any(isinstance(n.get('in_channels'), (list, tuple)) for n in necks):
        stages = assign_stages(old, backbone.stages, deepest_last=True) or stages
    old = old if len(stages) > 1 else old[-1:]
    new, cfg, made = [backbone.stages[i] for i in stages], backbone.with_outputs(stages), necks
    first = necks[0] if necks else {}
    pools = bare_name(first.get('type')).endswith('GlobalAveragePooling')
    if backbone.plain and (old[-1].stride is None or pools):  # its class token, without pooling
        cfg['out_type'], made, new = 'cls_token', necks[pools:], [FeatureMap(new[0].channels, None)]
    elif old[-1].stride is None and first.get('with_avg_pool') is False:  # of self-supervised training
        made = [{**first, 'with_avg_pool': True}, *necks[1:]]
        remark = f'{first["type"]} averages the last feature map in place of tokens'
    made = [Wiring(old, new)(neck) for neck in made]
    wiring = _head_wiring(necks, old, made, new, measured.size)
    if wiring and wiring.old_strides[-1] is None and wiring.new_strides[-1]:
        made, remark = [*made, _POOL], 'the head reads vectors: GlobalAveragePooling makes them'
    neck: Any = made
    if len(made) < 2 and not isinstance(network.get('neck'), (list, tuple)):
        neck = made[0] if made else None
    result, head = {**network, 'backbone': cfg, 'neck': neck}, network.get('head')
    if not head:
        return [Candidate(result, remark)]
    wired = Candidate({**result, 'head': (wiring or Wiring(old, new))(head, 0, 'head')}, remark)
    return _with_linear_head(wired, head, network['backbone'].get('num_classes'), backbone)


def _with_linear_head(wired: Candidate, head: dict, of_backbone: Optional[int], new: ZooBackbone) -> list[Candidate]:
    """Return the candidate ``wired`` and one with a linear classifier on the last feature map. Upstream backbones that
    classify themselves (LeNet, VGG), with ``of_backbone`` classes, get the second alone."""
    classes = head.get('num_classes') or of_backbone
    if not classes:
        return [wired]
    last = len(new.stages) - 1
    linear = dict(type='LinearClsHead', num_classes=classes, in_channels=new.stages[last].channels)
    linear.update({key: head[key] for key in ('loss', 'topk', 'cal_acc') if key in head})
    parts = dict(backbone=new.with_outputs([last]), neck=_POOL, head=linear)
    second = Candidate({**wired.network, **parts}, f'LinearClsHead on the last feature map replaces {head.get("type")}')
    return [wired, second] if head.get('num_classes') else [second]
