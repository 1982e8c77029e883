# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The ways to put a backbone into a network, one by one, without building a model."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from mmengine.config import Config

from mmlinattn.engine import ExactResumeHook, RunError
from mmlinattn.swapping import NoPlace, swap, zoo
from mmlinattn.swapping.rewiring import Plan, Wiring, adapter, direct, plans, with_outputs, without_unread
from mmlinattn.swapping.trial import Trial, TrialError
from mmlinattn.swapping.upstream import Measured, Upstream, _maps
from mmlinattn.swapping.writing import Code, as_text, changes, difference
from mmlinattn.swapping.zoo import FeatureMap, ZooBackbone

RESNET = [FeatureMap(256 * 2**i, 4 * 2**i) for i in range(4)]
OURS = tuple(FeatureMap(64 * 2**i, 4 * 2**i) for i in range(4))
PYRAMID = ZooBackbone('ours', dict(type='RAVLT', arch='tiny'), None, OURS, plain=False)
PLAIN = ZooBackbone(
    'plain', dict(type='LinearDeiT', arch='inline-tiny'), 'mmlinattn://plain', (FeatureMap(192, 16),), plain=True
)
FPN = dict(type='FPN', in_channels=[256, 512, 1024, 2048], out_channels=256, num_outs=5)
OLD, NEW = FPN['in_channels'], [64, 128, 256, 512]


read_once = SimpleNamespace(fromfile=functools.cache(Config.fromfile))


@pytest.fixture(autouse=True)
def configs_are_read_once(monkeypatch):
    monkeypatch.setattr(zoo, 'Config', read_once)


def parts(network, old, backbone, task, **kwargs):
    """Of every way the network without its backbone, and what it does to the backbone."""
    found = []
    for plan in plans(dict(network, backbone=dict(type='ResNet')), old, backbone, task, **kwargs):
        rest = {key: value for key, value in plan.network.items() if key != 'backbone'}
        extra = {key: value for key, value in plan.network['backbone'].items() if key not in backbone.cfg}
        assert {key: plan.network['backbone'][key] for key in backbone.cfg} == backbone.cfg
        found.append((rest, extra, plan.remark))
    return found


# ------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ('node', 'keep', 'expected'),
    [
        (dict(in_channels=(256, 512)), None, dict(in_channels=(64, 128))),  # the type stays
        (dict(in_channels=[512, 1024]), None, dict(in_channels=[128, 256])),  # some that follow one another
        (dict(in_channels=[256, 512, 1024]), None, dict(in_channels=[64, 128, 256])),
        (dict(in_channels=[2048, 256]), None, None),
        (dict(in_channels=[256, 1024]), None, None),
        (dict(in_channels=[1024, 2048]), [1, 3], dict(in_channels=[512])),
        (dict(in_channels=OLD[::-1]), [1, 3], dict(in_channels=[512, 128])),
        (dict(in_channels=[256, 1024], in_index=(0, 2)), [0, 2], dict(in_channels=[64, 256], in_index=(0, 1))),
        (dict(in_channels=[256, 512], in_index=(0, 2)), None, dict(in_channels=[256, 512], in_index=(0, 2))),
        (dict(in_channels=1024, in_index=-2), [2, 3], dict(in_channels=256, in_index=0)),
        (dict(in_channels=512, in_index=0), None, dict(in_channels=512, in_index=0)),  # not that map's
        (dict(in_channels=3840), [2, 3], dict(in_channels=768)),
        (dict(in_channels=512, c1_in_channels=512), None, dict(in_channels=128, c1_in_channels=512)),
        (dict(in_planes=1024, head_inplanes=512), None, dict(in_planes=256, head_inplanes=128)),
        (dict(in_channels_list=OLD), None, dict(in_channels_list=NEW)),
        (dict(in_channels=True, in_channels_scale=256, out_channels=256), None, None),
        (dict(in_channels=[], strides=[4, 8], main_channels=256), None, None),
        *(
            ({name: [4, 8, 16, 32]}, [1, 2], {name: [8, 16]})
            for name in ('strides', 'feature_strides', 'featmap_strides', 'in_strides')
        ),
        (dict(feature_strides=(4, 8, 16, 32)), [2, 3], dict(feature_strides=(16, 32))),
        (dict(strides=[8, 16, 32, 64]), None, None),
        (dict(start_level=2, end_level=3), [1, 2, 3], dict(start_level=1, end_level=2)),
        (dict(start_level=1), [2, 3], dict(start_level=0)),
        (dict(start_level=0, end_level=-1), [1, 2, 3], None),
        (
            dict(bbox_roi_extractor=dict(out_channels=1024, featmap_strides=[4, 8, 16, 32])),
            None,
            dict(bbox_roi_extractor=dict(out_channels=256, featmap_strides=[4, 8, 16, 32])),
        ),
        ([dict(in_channels=256), 'as it is'], None, [dict(in_channels=64), 'as it is']),
        (dict(train_cfg=dict(in_channels=256), data_preprocessor=dict(in_channels=256)), None, None),
        (dict(test_cfg=dict(in_channels=256), x=dict(backbone=dict(in_channels=256))), None, None),
        (dict(in_channels=[256, 2048], in_index=[0, -1]), [0, 3], dict(in_channels=[64, 512], in_index=[0, 1])),
        (dict(in_channels=[256, 2048], in_index=[-4, 3]), None, dict(in_channels=[64, 512], in_index=[0, 3])),
        (dict(in_channels=512, in_index=None), None, dict(in_channels=128, in_index=None)),
        # maps that only the neck makes
        (dict(in_channels=40, in_index=5), None, dict(in_channels=40, in_index=5)),
        (dict(in_channels=40, in_index=[3, 4, 5]), None, dict(in_channels=40, in_index=[3, 4, 5])),
    ],
)
def test_what_a_value_becomes(node, keep, expected):
    assert Wiring(RESNET, OURS, keep)(node) == (node if expected is None else expected)


def test_whether_anything_was_about_the_backbone():
    for node, matched in ((dict(in_channels=512), True), (dict(in_channels=77, strides=[4, 8, 16, 32]), False)):
        wiring = Wiring(RESNET, OURS)
        wiring(node)
        assert wiring.matched is matched
    wiring = Wiring(RESNET, OURS)
    wiring(dict(neck=dict(in_channels=512), head=dict(in_channels=77)))
    assert wiring.matched  # what follows may be about something else
    single = Wiring([FeatureMap(77, 32)], [FeatureMap(5, 32)])
    assert single(dict(in_channels=77)) == dict(in_channels=5) and single.matched
    # of equal maps the deepest
    assert Wiring([FeatureMap(9, 16)] * 2, OURS[:2])(dict(in_channels=9)) == dict(in_channels=128)
    plain = Wiring([FeatureMap(768, 16)] * 4, OURS)
    assert plain(dict(in_channels=[768] * 4)) == dict(in_channels=NEW)  # the same list from either end
    # which of two equal maps one number means, its index says
    assert Wiring([FeatureMap(9, 16)] * 2, OURS[:2])(dict(in_channels=9, in_index=0))['in_channels'] == 64


@pytest.mark.parametrize(('ints_below', 'inner'), [(None, 256), (2, 256), (1, 256), (0, 1024)])
def test_numbers_of_extractors_count_by_their_depth(ints_below, inner):
    node = dict(bbox_roi_extractor=dict(out_channels=1024), other=dict(out_channels=1024))
    listed = dict(heads=[dict(in_channels=1024)])
    inner_of_list = Wiring(RESNET, OURS, ints_below=ints_below)(listed)['heads'][0]['in_channels']
    assert inner_of_list == inner  # lists do not count
    found = Wiring(RESNET, OURS, ints_below=ints_below)(node)
    assert found == dict(bbox_roi_extractor=dict(out_channels=inner), other=dict(out_channels=1024))


def test_outputs_of_the_backbone():
    assert with_outputs(PYRAMID, [0, 1, 2, 3]) == PYRAMID.cfg
    assert with_outputs(PYRAMID, [3]) == dict(PYRAMID.cfg, out_indices=(3,)) != PYRAMID.cfg
    assert with_outputs(PLAIN, [0]) == dict(PLAIN.cfg, out_type='featmap')


def test_adapters_say_only_what_is_not_their_default():
    plain = dict(type='MapAdapter', in_channels=[64, 128], out_channels=[256, 512])
    assert adapter(OURS[:2], RESNET[:2], [0, 1], resize=True) == plain
    assert adapter(OURS[:2], [FeatureMap(256, 8), FeatureMap(512, 8)], [0, 1], resize=False) == plain
    assert adapter(OURS[:2], [FeatureMap(256, 8), FeatureMap(512, 2)], [1, 0], resize=True) == dict(
        plain, sources=[1, 0], scales=[1.0, 2.0]
    )


# ---------------------------------------------------------------------------------- the order of ways


def test_ways_of_a_network_with_a_neck():
    """Neck, neck and auxiliary head, neck and all heads, then 1x1 convolutions."""
    network = dict(
        neck=FPN,
        decode_head=dict(in_channels=256),
        auxiliary_head=dict(in_channels=1024, in_index=2),
        teacher_neck=dict(in_channels=OLD),
        test_cfg=dict(in_channels=256),
    )
    neck = dict(FPN, in_channels=NEW)
    aux = dict(in_channels=256, in_index=2)
    fixed = dict(type='MapAdapter', in_channels=NEW, out_channels=OLD)
    said = 'what follows takes maps of fixed widths only: 1x1 convolutions (MapAdapter) make them'
    assert parts(network, RESNET, PYRAMID, 'mmseg') == [
        (dict(network, neck=neck), {}, ''),
        (dict(network, neck=neck, auxiliary_head=aux), {}, ''),
        (dict(network, neck=neck, auxiliary_head=aux, decode_head=dict(in_channels=64)), {}, ''),
        *[(dict(network, neck=[fixed, FPN]), {}, said)] * 2,
    ]


def test_ways_of_a_network_without_a_neck():
    """The heads, numbers ever less deep inside; of a list of necks the first reads the backbone."""
    head = dict(in_channels=OLD, loss=dict(in_channels=512, inner=dict(in_channels=1024)))
    heads = [found['head'] for found, _, _ in parts(dict(head=head), RESNET, PYRAMID, 'mmdet')[:3]]
    assert heads == [
        dict(in_channels=NEW, loss=dict(in_channels=128, inner=dict(in_channels=256))),
        dict(in_channels=NEW, loss=dict(in_channels=128, inner=dict(in_channels=1024))),
        dict(in_channels=NEW, loss=dict(in_channels=512, inner=dict(in_channels=1024))),
    ]
    extractor = dict(mask_roi_extractor=dict(out_channels=1024))
    assert parts(extractor, RESNET, PYRAMID, 'mmdet')[0][0] == dict(mask_roi_extractor=dict(out_channels=256))
    several = dict(neck=[dict(in_channels=OLD), dict(in_channels=OLD)])
    assert parts(several, RESNET, PYRAMID, 'mmdet')[0][0] == dict(neck=[dict(in_channels=NEW), dict(in_channels=OLD)])


def test_what_a_way_needs():
    """No way through a neck, or beside it, where there is none; a missing auxiliary head is no way of its own."""
    bare, necked = (dict(backbone=dict(type='ResNet'), neck=neck, head=dict(in_channels=256)) for neck in (None, FPN))
    made = {
        (where, neck): direct(network, PYRAMID, range(4), RESNET, OURS, where)
        for where in ('neck', 'auxiliary', 'both', 'heads')
        for neck, network in (('bare', bare), ('necked', necked))
    }
    assert {key for key, plan in made.items() if plan is not None} == {
        ('neck', 'necked'),
        ('both', 'necked'),
        ('heads', 'bare'),
    }
    plan = direct(necked, PYRAMID, (0, 1, 3), RESNET[:3], [OURS[0], OURS[1], OURS[3]], 'neck', keep=[1, 2])
    assert plan.network['backbone']['out_indices'] == (1, 3)


def test_decoders_of_backbones_go_with_them():
    """BiSeNetV2: its first map, at stride 8, is made of all; the head reads it, so it is made of the deepest stage."""
    old = [FeatureMap(128, 8), FeatureMap(16, 4), FeatureMap(32, 8), FeatureMap(64, 16), FeatureMap(128, 32)]
    head = dict(type='FCNHead', in_channels=128, in_index=0)
    said = 'ResNet holds a decoder of its own, which goes with it; the head reads the deepest stage (MapAdapter)'
    neck = dict(
        type='MapAdapter',
        in_channels=NEW,
        out_channels=[128, 16, 32, 64, 128],
        sources=[3, 0, 1, 2, 3],
        scales=[4.0, 1.0, 1.0, 1.0, 1.0],
    )
    for heads in (head, [dict(head, in_index=3), head]):  # of a cascade the last predicts
        assert parts(dict(decode_head=heads), old, PYRAMID, 'mmseg') == [(dict(decode_head=heads, neck=neck), {}, said)]
    # without an index it is the last map
    ((found, _, _),) = parts(dict(decode_head=dict(in_channels=64)), old[:4], PYRAMID, 'mmseg')
    assert found['neck']['sources'] == [1, 0, 1, 3 - 1] and found['neck']['in_channels'] == [64, 128, 512]


def test_branches_of_which_inference_reads_one():
    old = [FeatureMap(64, 8), FeatureMap(128, 8)]
    neck = dict(type='MapAdapter', in_channels=[128, 512], out_channels=[64, 128], scales=[1.0, 4.0])
    neck['inference_output'] = 1
    ((found, extra, _),) = parts(dict(decode_head=dict(in_index=0)), old, PYRAMID, 'mmseg', alone=1)
    assert found['neck'] == neck and extra == dict(out_indices=(1, 3))
    ((found, _, _),) = parts(dict(neck=[FPN]), old, PYRAMID, 'mmseg', alone=1)
    assert found['neck'] == [neck, FPN]
    ((found, _, _),) = parts(dict(decode_head=dict(in_index=1)), old, PYRAMID, 'mmseg', alone=0)  # the first
    sources = dict(in_channels=[128, 512], sources=[1, 0], scales=[4.0, 1.0], inference_output=0)
    assert found['neck'] == dict(neck, **sources)
    # of a head that reads several maps each is made of the stage nearest by its stride
    several = [FeatureMap(64, 32), FeatureMap(128, 8)]
    ((found, _, _),) = parts(dict(decode_head=dict(in_index=[0, 1])), several, PYRAMID, 'mmseg')
    assert found['neck']['sources'] == [1, 0] and 'scales' not in found['neck']


def test_necks_that_make_pyramids_of_plain_maps_are_left_out():
    old = [FeatureMap(768, 16)] * 4
    heads = dict(decode_head=dict(in_channels=[96] * 4, in_index=[0, 1, 2, 3]))
    after = dict(decode_head=dict(in_channels=NEW, in_index=[0, 1, 2, 3]))
    for key in ('out_channels', 'embed_dim'):
        neck = {'type': 'MultiLevelNeck', 'in_channels': [768] * 4, key: 96}
        first = parts(dict(heads, neck=neck), old, PYRAMID, 'mmseg')[0]
        said = 'MultiLevelNeck made a pyramid of plain maps; the backbone is one itself'
        assert first == (dict(after, neck=None), {}, said)
    other = dict(decode_head=dict(in_channels=[11] * 4))  # reads something else
    assert parts(dict(other, neck=neck), old, PYRAMID, 'mmseg')[0][0]['neck'] is not None
    # of one map no pyramid is made (YOLOF)
    single = dict(neck=dict(type='DilatedEncoder', in_channels=2048, out_channels=512), bbox_head=dict(in_channels=512))
    first = parts(single, RESNET[3:], PYRAMID, 'mmdet')[0]
    assert first == (dict(single, neck=dict(single['neck'], in_channels=512)), dict(out_indices=(3,)), '')


def test_teachers_read_backbones_of_their_own():
    for where, neck in (('heads', None), ('both', FPN)):
        network = dict(backbone=dict(type='ResNet'), neck=neck, bbox_head=dict(in_channels=256))
        for key in ('teacher_backbone', 'teacher_neck', 'teacher_bbox_head', 'teacher'):
            network[key] = dict(in_channels=256)
        found = direct(network, PYRAMID, range(4), RESNET, OURS, where).network
        assert found['bbox_head'] == dict(in_channels=64)
        assert {key: value for key, value in found.items() if key.startswith('teacher')} == {
            key: dict(in_channels=256) for key in network if key.startswith('teacher')
        }


def test_what_a_backbone_gives():
    """Channels and pixels a position: a row more or less at the border, or padded ones, make no other stride."""

    def found(*sizes):
        return _maps(tuple(torch.zeros(1, channels, rows, rows) for channels, rows in sizes), 256)

    assert found((8, 64), (16, 32)) == [FeatureMap(8, 4), FeatureMap(16, 8)]
    assert found((8, 65), (16, 33)) == found((8, 63), (16, 31)) == found((8, 64), (16, 32))
    assert found((8, 600)) == [FeatureMap(8, 1)]
    tokens, image = torch.zeros(1, 4, 24), torch.zeros(1, 8, 4, 4)
    assert _maps(tokens, 64) == _maps([tokens[:, 0]], 64) == [FeatureMap(24, None)]
    assert _maps([(image, tokens[:, 0])], 64) == [FeatureMap(8, 16)]  # and its class token
    assert _maps((image, dict()), 64) == []


def test_maps_that_fit_no_stage_are_no_place():
    for backbone in (PYRAMID, PLAIN):
        for old in ([FeatureMap(768, None)], [*RESNET, FeatureMap(768, None)]):
            assert parts(dict(neck=FPN), old, backbone, 'mmdet') == []


# -------------------------------------------------------------------------------- plain backbones


def test_plain_for_plain():
    """Four maps of one stride come of blocks at even distances, as upstream's do; one map comes of the last."""
    heads = dict(decode_head=dict(in_channels=[768] * 4, in_index=[0, 1, 2, 3]))
    (rest, extra, said), *_ = parts(heads, [FeatureMap(768, 16)] * 4, PLAIN, 'mmseg')
    assert rest == dict(decode_head=dict(in_channels=[192] * 4, in_index=[0, 1, 2, 3])) and said == ''
    assert extra == dict(out_type='featmap', out_indices=(2, 5, 8, 11))
    # twelve blocks for five maps: as even as they go, up to the last block
    (_, extra, _), *_ = parts(dict(decode_head=dict(in_channels=[768] * 5)), [FeatureMap(768, 16)] * 5, PLAIN, 'mmseg')
    blocks = extra['out_indices']
    assert blocks[-1] == 11 and {after - before for before, after in zip((-1, *blocks), blocks)} == {2, 3}
    neck = dict(neck=dict(type='ViTNeck', in_channels=768), bbox_head=dict(in_channels=768))
    found = parts(neck, [FeatureMap(768, 16)], PLAIN, 'mmdet')
    assert [extra for _, extra, _ in found] == [dict(out_type='featmap')] * 3
    after = dict(type='ViTNeck', in_channels=192)
    assert [rest for rest, _, _ in found[:2]] == [
        dict(neck, neck=after),
        dict(neck=after, bbox_head=dict(in_channels=192)),
    ]


def test_plain_for_a_pyramid():
    simple = dict(type='SimpleFeaturePyramid', in_channels=192, out_channels=256, num_outs=4)
    maps = dict(
        type='MapAdapter', in_channels=[192], out_channels=OLD, sources=[0, 0, 0, 0], scales=[4.0, 2.0, 1.0, 0.5]
    )
    neck = dict(FPN, num_outs=4)
    said = 'the maps of a pyramid are made of the one of the plain backbone (MapAdapter)'
    assert parts(dict(neck=neck), RESNET, PLAIN, 'mmdet') == [
        (dict(neck=simple), dict(out_type='featmap'), ''),
        (dict(neck=[maps, neck]), dict(out_type='featmap'), said),
    ]
    for changed, old in ((dict(num_outs=6), RESNET), ({}, RESNET[1:])):  # more levels; a pyramid from stride 8 on
        ((rest, _, _),) = parts(dict(neck=dict(neck, **changed)), old, PLAIN, 'mmdet')
        assert rest['neck'][0]['type'] == 'MapAdapter'


# ------------------------------------------------------------------------------------ classifiers


def test_classifiers_read_the_last_map():
    pool = dict(type='GlobalAveragePooling')
    head = dict(
        type='StackedLinearClsHead', in_channels=2048, num_classes=10, loss=dict(type='L'), topk=(1,), cal_acc=1
    )
    linear = dict(type='LinearClsHead', num_classes=10, in_channels=512, loss=dict(type='L'), topk=(1,), cal_acc=1)
    said = 'StackedLinearClsHead reads what only its backbone gives; global average and LinearClsHead take its place'
    after = (dict(neck=pool, head=dict(head, in_channels=512)), dict(out_indices=(3,)), '')
    last = (dict(neck=pool, head=linear), dict(out_indices=(3,)), said)
    assert parts(dict(neck=pool, head=head), RESNET[3:], PYRAMID, 'mmpretrain') == [after, after, last]
    # of a neck and a head that say the same number either may read the backbone
    equal, changed = dict(type='N', in_channels=2048), dict(type='N', in_channels=512)
    found = [rest for rest, _, _ in parts(dict(neck=equal, head=equal), RESNET[3:], PYRAMID, 'mmpretrain')]
    assert found == [dict(neck=n, head=h) for n, h in ((changed, changed), (changed, equal), (equal, changed))]
    # a plain one gives its class token to what averaged a map
    first = parts(dict(neck=pool, head=head), RESNET[3:], PLAIN, 'mmpretrain')[0]
    assert first == (dict(neck=None, head=dict(head, in_channels=192)), dict(out_type='cls_token'), '')
    # without a neck: as it is, then averaged
    found = parts(dict(head=head), RESNET[3:], PYRAMID, 'mmpretrain')
    assert [rest.get('neck') for rest, _, _ in found] == [None, None, pool, pool, pool]
    assert [said for *_, said in found[:4]] == [''] * 4


def test_heads_that_read_tokens():
    token = [FeatureMap(768, None)]
    head = dict(type='VisionTransformerClsHead', in_channels=768, num_classes=5)
    found = parts(dict(head=head), token, PYRAMID, 'mmpretrain')
    said = 'the head read tokens; the mean of the last map takes their place'
    pooled = dict(neck=dict(type='GlobalAveragePooling'), head=dict(head, in_channels=512))
    assert found[0] == (pooled, dict(out_indices=(3,)), said)
    assert found[-1][0]['head'] == dict(type='LinearClsHead', in_channels=512, num_classes=5)
    assert parts(dict(head=head), token, PLAIN, 'mmpretrain')[0] == (
        dict(head=dict(head, in_channels=192), neck=None),
        dict(out_type='cls_token'),
        '',
    )
    # self-supervised: neck and predictor
    neck = dict(type='NonLinearNeck', in_channels=768, with_avg_pool=False)
    kept = dict(neck=dict(neck, in_channels=192), head=dict(type='MoCoV3Head'))
    found = parts(dict(kept, neck=neck), token, PLAIN, 'mmpretrain')
    assert found[0] == (kept, dict(out_type='cls_token'), '')
    found = parts(dict(neck=neck, head=dict(type='MoCoV3Head')), token, PYRAMID, 'mmpretrain')
    said = 'NonLinearNeck read tokens; the mean of the last map takes their place'
    assert found[0] == (
        dict(neck=dict(neck, in_channels=512, with_avg_pool=True), head=dict(type='MoCoV3Head')),
        dict(out_indices=(3,)),
        said,
    )
    for pools in (dict(neck, with_avg_pool=True), dict(type='NonLinearNeck', in_channels=768)):  # its default
        assert parts(dict(neck=pools), token, PYRAMID, 'mmpretrain') == []


def test_classifiers_that_read_several_maps_or_lie_in_the_backbone():
    neck = dict(type='HRFuseScales', in_channels=tuple(OLD))
    rest, extra, _ = parts(dict(neck=neck), RESNET, PYRAMID, 'mmpretrain')[0]
    assert rest == dict(neck=dict(neck, in_channels=tuple(NEW))) and extra == {}
    # the last map is the deepest stage
    neck = dict(type='HRFuseScales', in_channels=(512, 1024))
    rest, extra, _ = parts(dict(neck=neck), [FeatureMap(512, 8), FeatureMap(1024, 16)], PYRAMID, 'mmpretrain')[0]
    assert rest == dict(neck=dict(neck, in_channels=(128, 512))) and extra == dict(out_indices=(1, 3))
    network = dict(backbone=dict(type='LeNet5', num_classes=7), head=dict(type='ClsHead', loss=dict(type='L')))
    *_, plan = plans(network, [FeatureMap(84, None)], PYRAMID, 'mmpretrain')
    assert plan.network['head'] == dict(type='LinearClsHead', num_classes=7, in_channels=512, loss=dict(type='L'))
    assert plan.network['neck'] == dict(type='GlobalAveragePooling')
    network['head']['type'] = 'ArcFaceClsHead'  # with classes of its own, which it does not say here
    assert list(plans(network, [FeatureMap(84, None)], PYRAMID, 'mmpretrain')) == []


# --------------------------------------------------------------------------- narrowing to what is read


def test_maps_that_are_not_read_are_left_out():
    neck = dict(type='MapAdapter', in_channels=NEW, out_channels=[9, 9, 9], sources=[3, 0, 2])
    plan = Plan(dict(backbone=dict(PYRAMID.cfg), neck=neck), 'said', None)
    found = without_unread(plan, (True, False, False, True))
    assert found.network['neck'] == dict(neck, in_channels=[64, 512], sources=[1, 0, None])
    assert found.network['backbone']['out_indices'] == (0, 3) and found.remark == 'said'
    assert neck['sources'] == [3, 0, 2]  # the plan stays as it was
    some = dict(backbone=dict(PYRAMID.cfg, out_indices=(1, 3)), neck=[dict(neck, in_channels=[128, 512])])
    some['neck'][0].pop('sources')
    found = without_unread(plan._replace(network=some), (False, True)).network
    assert found['backbone']['out_indices'] == (3,) and found['neck'][0]['sources'] == [None, 0, None]
    assert without_unread(plan, (True, False)) is None  # of other maps
    assert without_unread(plan._replace(network=dict(some, neck=FPN)), (False, True)) is None


def test_a_wiring_is_made_again_for_what_is_read():
    network = dict(backbone=dict(type='ResNet'), neck=dict(FPN, start_level=1))
    plan = next(plans(network, RESNET, PYRAMID, 'mmdet'))
    trial = Trial(1.0, (False, True, True, True), ())
    found = swap._narrow(network, PYRAMID, plan, trial).network
    assert found['backbone']['out_indices'] == (1, 2, 3)
    assert found['neck'] == dict(FPN, in_channels=NEW[1:], start_level=0)
    for read in ((True,) * 4, (False,) * 4, (True, False)):  # all; none, as of frozen ones; unknown
        assert swap._narrow(network, PYRAMID, plan, trial._replace(read=read)) is None
    assert swap._narrow(network, PLAIN, plan, trial) is None
    made = dict(network, neck=adapter(OURS, RESNET, range(4), resize=False), backbone=dict(PYRAMID.cfg))
    found = swap._narrow(network, PYRAMID, Plan(made, '', None), trial).network  # of a MapAdapter
    assert found['neck']['in_channels'] == NEW[1:] and found['backbone']['out_indices'] == (1, 2, 3)
    # places are those of upstream's maps, also where some went before
    narrowed = swap._narrow(network, PYRAMID, plan, trial)
    found = swap._narrow(network, PYRAMID, narrowed, trial._replace(read=(False, True, True))).network
    assert found['backbone']['out_indices'] == (2, 3)
    assert found['neck'] == dict(FPN, in_channels=NEW[2:], start_level=0)


# ----------------------------------------------------------------------------------- which way is taken


def upstream_of(model, task='mmdet', **cfg):
    return Upstream(f'{task}::folder/config.py', Config(dict(model=model, **cfg)), task, ())


def wired(tries, model=None, wrapper=None):
    """What :func:`swap._wire` takes where the networks of its tries do as listed: a Trial, or an error. The upstream
    network itself is asked about by a type of backbone."""
    model = model or dict(backbone=dict(type='ResNet'), neck=FPN, head=dict(in_channels=256))
    asked = []

    def try_model(network, task, optim_wrapper=None, masks=True, image_size=None):
        asked.append(network)
        answer = tries[0] if network['backbone']['type'] == 'ResNet' else tries[1:][sum(is_ours(n) for n in asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_ours(network):
        return network['backbone']['type'] != 'ResNet'

    with mock.patch.object(swap, 'try_model', try_model):
        found = swap._wire(upstream_of(model), PYRAMID, Measured(RESNET), wrapper)
    return found, asked


GOOD = Trial(1.0, (True,) * 4, ())


def test_the_first_way_that_trains_all_and_predicts_is_taken():
    some = Trial(1.0, (True,) * 4, ('stages.0.weight',))
    (plan, trial, remark), asked = wired([None, TrialError('training stops: x'), some, GOOD])
    assert trial is GOOD and plan.network is asked[2]
    assert [isinstance(network['neck'], list) for network in asked] == [False, False, True]
    assert remark == 'what follows takes maps of fixed widths only: 1x1 convolutions (MapAdapter) make them'


def test_of_ways_that_come_to_the_same_one_is_tried_and_then_the_others():
    first, other = (Plan(dict(backbone=dict(PYRAMID.cfg), neck=neck), '', None) for neck in (FPN, None))
    with mock.patch.object(swap, 'plans', lambda *_: iter([first, first._replace(remark='the same'), other])):
        (plan, _, _), asked = wired([None, TrialError('training stops: x'), GOOD])
    assert plan is other and asked == [first.network, other.network]


@pytest.mark.parametrize(
    ('again', 'taken'),
    [
        (GOOD._replace(read=(True,) * 3), True),
        (GOOD._replace(without_gradient=('x',)), False),
        (GOOD._replace(stops='prediction stops: y'), False),
        (TrialError('training stops: y'), False),
    ],
)
def test_fewer_maps_where_these_do(again, taken):
    (plan, trial, _), asked = wired([None, GOOD._replace(read=(False, True, True, True)), again])
    assert len(asked) == 2 and plan.network == asked[1 if taken else 0]
    assert len(trial.read) == (3 if taken else 4)


def test_predictions_may_stop_where_upstreams_do():
    stops = GOOD._replace(stops='prediction stops: no data')
    (_, trial, remark), asked = wired([stops, stops])
    assert trial is stops and len(asked) == 2
    assert remark == "upstream's own prediction stops: no data, and so this one's"
    unread, three = stops._replace(read=(False, True, True, True)), stops._replace(read=(True,) * 3)
    (plan, trial, _), asked = wired([stops, unread, three])  # with fewer maps as with all
    assert trial is three and plan.network == asked[1]
    with pytest.raises(RunError) as error:  # it has something of its own to stop at
        wired([GOOD._replace(stops='prediction stops: a'), *[stops] * 3])
    assert str(error.value) == (
        'mmdet::folder/config.py does not run here with its own backbone either: prediction stops: a'
    )


def test_no_way_says_what_stopped_the_first():
    with pytest.raises(NoPlace) as error:
        wired([GOOD, GOOD._replace(without_gradient=tuple('abcd')), TrialError('late'), TrialError('later')])
    said = 'mmdet::folder/config.py has no place for ours: no gradient reaches a, b, c of the backbone'
    assert str(error.value) == said
    with pytest.raises(RunError, match='either: it cannot be built: y$'):
        wired([TrialError('it cannot be built: y'), *[TrialError('x')] * 3])
    with pytest.raises(NoPlace, match='has no place for ours: the maps of ResNet are none that a pyramid has$'):
        with mock.patch.object(swap, 'try_model', return_value=GOOD):
            swap._wire(upstream_of(dict(backbone=dict(type='ResNet'))), PYRAMID, Measured([FeatureMap(9, None)]), None)


def test_networks_are_tried_with_the_data_of_the_config(monkeypatch):
    """With masks or without, in pictures of its size; of the upstream network only whether it runs counts."""
    asked, answers = [], []

    def try_model(network, task, optim_wrapper=None, masks=True, image_size=None):
        asked.append((network, task, optim_wrapper, masks, image_size))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(swap, 'try_model', try_model)
    pipeline = [dict(type='LoadAnnotations', with_mask=True), dict(type='Resize', scale=(96, 64), keep_ratio=False)]
    loader = dict(dataset=dict(pipeline=pipeline))
    model, wrapper = dict(backbone=dict(type='ResNet')), dict(type='OptimWrapper')
    twice = TrialError('training stops: some parameters appear in more than one parameter group')
    for source, data in (
        (upstream_of(model, train_dataloader=loader), (True, (64, 96))),
        (upstream_of(model, task='mmseg'), (False, None)),
    ):
        answers[:] = [twice, GOOD, GOOD._replace(stops='prediction stops: x'), TrialError('it cannot be built: y')]
        assert swap._attempt('network', source, wrapper) is GOOD
        assert swap._what_stops('theirs', source) == 'prediction stops: x'
        assert swap._what_stops('theirs', source) == 'it cannot be built: y'
        first = ('network', source.task, wrapper, *data)
        assert asked == [first, first, *[('theirs', source.task, None, *data)] * 2]
        asked.clear()
    answers[:] = [twice]
    with pytest.raises(TrialError):  # without an optimizer to set it in
        swap._attempt('network', source, None)


def test_modules_that_share_parameters_are_taken_once():
    wrapper = dict(type='OptimWrapper')
    shared = ValueError('some parameters appear in more than one parameter group')
    (_, trial, _), asked = wired([None, TrialError(str(shared)), GOOD], wrapper=wrapper)
    assert trial is GOOD and asked[0] is asked[1] and wrapper['paramwise_cfg'] == dict(bypass_duplicate=True)
    wrapper = dict(type='OptimWrapper')
    wired([None, TrialError('training stops: x'), GOOD], wrapper=wrapper)
    assert 'paramwise_cfg' not in wrapper


# ------------------------------------------------------------------------------------- all of it


BGR = dict(type='P', mean=[103.53, 116.28, 123.675], std=[1.0, 1.0, 1.0], bgr_to_rgb=False)
SGD = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02))


@pytest.fixture
def swapped(monkeypatch, tmp_path):
    """What :func:`swap_backbone` makes of a network whose only way is known, and what its steps were asked."""
    seen = SimpleNamespace()

    def run(new, backbone, out=None, remark='', keep_optimizer=False, **model):
        model = dict(dict(type='KD', backbone=backbone, neck=FPN, data_preprocessor=BGR), **model)
        source = upstream_of(model, optim_wrapper=SGD, load_from='whole.pth')
        seen.source, seen.checked, trial = source, [], GOOD._replace(loss=2.0)

        def wire(source, new, old, wrapper):
            seen.wired = (source, new, old, wrapper)
            network = dict(model, backbone=dict(new.cfg), neck=dict(FPN, in_channels=NEW))
            network.update({key: None for key in model if key == 'teacher_ckpt'})
            return Plan(network, remark, None), trial, remark

        monkeypatch.setattr(swap, 'read_upstream', lambda spec: source if spec == 'spec' else None)
        monkeypatch.setattr(
            swap, 'find_backbone', lambda name, task: new if (name, task) == ('ours', 'mmdet') else None
        )
        monkeypatch.setattr(swap, 'measure', lambda given: Measured(RESNET) if given is source else None)
        monkeypatch.setattr(swap, '_wire', wire)
        monkeypatch.setattr(swap, '_check_file', lambda *args: seen.checked.append(args))
        found = swap.swap_backbone('spec', 'ours', out, keep_optimizer)
        assert found.trial is trial
        return found

    return run, seen


def test_a_backbone_with_weights_takes_a_place(swapped, tmp_path):
    """In the file: it and its weights, the pictures that it knows, the optimizer; a teacher keeps its own weights."""
    run, seen = swapped
    new = PYRAMID._replace(name='ravlt_t', checkpoint='mmlinattn://ours')
    out, whole = tmp_path / 'new' / 'deep' / 'swapped.py', dict(type='Pretrained', checkpoint='whole.pth')
    old = dict(type='ResNet', frozen_stages=4)
    found = run(new, old, out, 'said', teacher_ckpt='t.pth', init_cfg=whole)
    assert found.changes == [
        'backbone: ResNet -> RAVLT tiny',
        f'neck.in_channels: {OLD} -> {NEW}',
        'data_preprocessor.mean: [103.53, 116.28, 123.675] -> [123.675, 116.28, 103.53]',
        'data_preprocessor.std: [1.0, 1.0, 1.0] -> [58.395, 57.12, 57.375]',
        'data_preprocessor.bgr_to_rgb: False -> True',
        'init_cfg: Pretrained -> None',
        'optimizer: SGD lr=0.02 -> AdamW lr=0.0001 weight_decay=0.05',
        "optim_wrapper.paramwise_cfg: None -> {'custom_keys': {'norm': {'decay_mult': 0.0}}}",
        'auto_scale_lr.base_batch_size: None -> 16',
        'load_from: whole.pth -> None',
        "custom_hooks, custom_imports: this project's, beside upstream's",
    ]
    assert found.remarks == [
        'the learning rate is for 16 pictures a step (--auto-scale-lr scales it)',
        'upstream trains nothing but what follows the backbone (frozen_stages=4); here all of it trains, unless the '
        'config says backbone=dict(frozen_stages=4)',
        'said',
    ]
    assert seen.wired[:3] == (seen.source, new, Measured(RESNET)) and seen.wired[3]['optimizer']['type'] == 'AdamW'
    assert out.read_text() == found.text and "checkpoint='mmlinattn://ours'" in found.text
    ((path, source, model),) = seen.checked
    assert (path, source) == (out, seen.source) and model['teacher_ckpt'] == 't.pth'
    assert model['backbone'] == dict(PYRAMID.cfg, init_cfg=dict(type='Pretrained', checkpoint='mmlinattn://ours'))


def test_a_backbone_without_weights_takes_a_place(swapped):
    run, seen = swapped
    new = PYRAMID._replace(name='ravlt_t')
    found = run(new, dict(type='ResNet', frozen_stages=3), keep_optimizer=True)
    assert found.changes == [
        'backbone: ResNet -> RAVLT tiny',
        f'neck.in_channels: {OLD} -> {NEW}',  # pictures are those of upstream
        'load_from: whole.pth -> None',
        "custom_hooks, custom_imports: this project's, beside upstream's",
    ]
    assert found.remarks == ['it starts without ImageNet weights: none of ours are released'] and seen.checked == []
    assert seen.wired[3] == SGD and 'init_cfg' not in found.text
    # of a plain one, which has no stages to freeze, nothing is said
    found = run(PLAIN._replace(name='ravlt_t'), dict(type='ResNet', frozen_stages=4), keep_optimizer=True)
    assert found.remarks == []
    released = new._replace(checkpoint='mmlinattn://ours')
    for channels in (1, 4):
        found = run(released, dict(type='ResNet', in_channels=channels), keep_optimizer=True)
        assert found.remarks == [f'it starts without ImageNet weights: pictures of {channels} channel(s)']
        assert seen.wired[1].cfg == dict(PYRAMID.cfg, in_channels=channels) and 'mmlinattn://' not in found.text


# --------------------------------------------------------------------------- the model and its file


def test_parts_of_larger_models():
    """The network's changes go back to where it came from; what only served to run it does not."""
    model = dict(type='Tracker', detector=dict(type='D', backbone=1, bbox_head=2), reid=3)
    network = dict(type='D', backbone='new', neck='new neck', bbox_head='new head', data_preprocessor='for the trial')
    assert swap._replaced(model, ('detector',), network) == dict(
        type='Tracker', detector=dict(type='D', backbone='new', neck='new neck', bbox_head='new head'), reid=3
    )
    assert swap._replaced(model, (), network) == network


def test_a_part_is_run_with_a_preprocessor_of_its_own():
    model = dict(type='T', detector=dict(type='D', backbone=dict(type='ResNet')))
    source = upstream_of(model)._replace(path=('detector',))
    found = swap._trainable(source)
    assert found['data_preprocessor'] == dict(type='DetDataPreprocessor', pad_mask=True, pad_size_divisor=32)
    assert 'data_preprocessor' not in source.network(source.model)
    kept = dict(model, detector=dict(model['detector'], data_preprocessor=dict(type='mine')))
    assert swap._trainable(upstream_of(kept)._replace(path=('detector',)))['data_preprocessor'] == dict(type='mine')
    assert 'data_preprocessor' not in swap._trainable(upstream_of(model['detector']))


def test_teachers_are_found_in_the_installed_project(tmp_path, monkeypatch):
    mmdet = pytest.importorskip('mmdet')
    model = dict(type='KD', backbone=dict(type='R'), teacher_config='configs/gfl/x.py', teacher_ckpt='t.pth')
    found = swap._trainable(upstream_of(model))
    assert found['teacher_config'] == f'{mmdet.__path__[0]}/.mim/configs/gfl/x.py' and found['teacher_ckpt'] is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'teacher.py').touch()
    for mine in ('teacher.py', str(tmp_path / 'teacher.py')):  # a file from here
        assert swap._trainable(upstream_of(dict(model, teacher_config=mine)))['teacher_config'] == mine
    by_path = upstream_of(model)._replace(base='/some/config.py')
    assert swap._trainable(by_path)['teacher_config'] == 'configs/gfl/x.py'


RGB = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        # ResNet's caffe weights: BGR, not scaled
        (dict(mean=[103.53, 116.28, 123.675], std=[1, 1, 1], bgr_to_rgb=False), dict(RGB, bgr_to_rgb=True)),
        (dict(RGB, bgr_to_rgb=True, pad_size_divisor=32), dict(RGB, bgr_to_rgb=True, pad_size_divisor=32)),
        (dict(RGB, to_rgb=True), dict(RGB, to_rgb=True)),
        (dict(RGB, to_rgb=False), dict(RGB, to_rgb=False)),  # pictures are RGB as they are read
        (dict(RGB), dict(RGB, bgr_to_rgb=False)),
        (dict(mean=[0, 0, 0], std=[255, 255, 255]), dict(RGB, bgr_to_rgb=True)),
        (dict(pad_size_divisor=32), dict(RGB, bgr_to_rgb=True, pad_size_divisor=32)),
        (dict(RGB, bgr_to_rgb=False, rgb_to_bgr=True), dict(RGB, bgr_to_rgb=False)),
        (dict(mean=[33.46], std=[78.87]), dict(mean=[33.46], std=[78.87])),
    ],
)
def test_pictures_are_normalised_as_the_weights_know_them(given, expected):
    model = dict(type='M', data_preprocessor=dict(type='P', **given), reid=dict(data_preprocessor=dict(given)))
    swap._normalise(model)
    assert model == dict(type='M', data_preprocessor=dict(type='P', **expected), reid=dict(data_preprocessor=expected))
    # also behind one of grey pictures
    grey = dict(mean=[33.46], std=[78.87])
    model = dict(data_preprocessor=dict(grey), reid=dict(data_preprocessor=dict(given)))
    swap._normalise(model)
    assert model == dict(data_preprocessor=grey, reid=dict(data_preprocessor=expected))
    # a wrapper of preprocessors: those inside
    model = dict(data_preprocessor=dict(type='Multi', data_preprocessor=dict(given)))
    swap._normalise(model)
    assert model == dict(data_preprocessor=dict(type='Multi', data_preprocessor=expected))


def settings(task, model, cfg, keep=False, name='ravlt_t'):
    source = SimpleNamespace(cfg=Config(cfg), model=model, task=task)
    return swap._settings(source, PYRAMID._replace(name=name), keep)


def test_imports_and_hooks_of_upstream_stay():
    cfg = dict(custom_imports=dict(imports=['mmlinattn', 'mine']), custom_hooks=[dict(type='EMAHook')])
    found, remarks = settings('mmdet', {}, cfg)
    assert found['custom_imports'] == dict(imports=['mine', 'mmlinattn'], allow_failed_imports=False)
    lines = str(found['custom_hooks']).splitlines()
    assert lines[:2] == ['[', '    *_base_.custom_hooks,'] and lines[-1] == ']'
    assert any("type='UnusedParametersHook'" in line for line in lines) and isinstance(found['custom_hooks'], Code)
    assert remarks == [] and set(found) == {'custom_imports', 'custom_hooks'}  # there is no optimizer to replace
    found, _ = settings('mmdet', {}, dict(custom_imports=dict(imports='mine'), load_from=None))
    assert found['custom_imports']['imports'] == ['mine', 'mmlinattn'] and 'load_from' not in found
    assert '_base_' not in str(found['custom_hooks'])


def test_hooks_that_are_there_are_not_put_in_again():
    """Of a config of ours, or one that was swapped before: of two, each would rebuild what the other has rebuilt."""
    theirs = [dict(type='EMAHook'), dict(type='mmengine.StopHook'), dict(type=ExactResumeHook)]
    (found, _), (plain, _) = (settings('mmdet', {}, dict(custom_hooks=hooks)) for hooks in (theirs, theirs[:1]))
    lines, others = (str(given['custom_hooks']).splitlines() for given in (found, plain))
    left_out = [line for line in others if line not in lines]
    assert lines == [line for line in others if line not in left_out] and lines[1] == '    *_base_.custom_hooks,'
    assert [re.search(r"type='(\w+)'", line)[1] for line in left_out] == ['ExactResumeHook', 'StopHook']


@pytest.mark.parametrize(
    ('task', 'model', 'rate', 'decay', 'batch'),
    [
        ('mmdet', dict(type='MaskRCNN'), 1e-4, 0.05, 16),
        ('mmdet', dict(type='RetinaNet'), 1e-4, 1e-4, 16),
        ('mmseg', dict(decode_head=dict(type='UPerHead')), 6e-5, 0.01, 16),
        ('mmseg', dict(decode_head=[dict(type='FPNHead')]), 1e-4, 1e-4, 16),
        ('mmpretrain', dict(head=dict(type='FPNHead')), 1e-3, 0.05, 1024),
    ],
)
def test_the_recipe_is_that_of_the_paper_for_such_a_network(task, model, rate, decay, batch):
    wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02), accumulative_counts=4)
    wrapper['paramwise_cfg'] = dict(bypass_duplicate=True, norm_decay_mult=0.5)
    found, remarks = settings(task, model, dict(optim_wrapper=wrapper))
    made = found['optim_wrapper']
    assert (made['optimizer']['lr'], made['optimizer']['weight_decay']) == (rate, decay)
    assert made['accumulative_counts'] == 4 and made['paramwise_cfg']['bypass_duplicate'] is True
    assert '_scope_' not in made['optimizer'] and made['paramwise_cfg'].get('norm_decay_mult') != 0.5
    assert found['auto_scale_lr'] == dict(base_batch_size=batch)
    assert remarks == [f'the learning rate is for {batch} pictures a step (--auto-scale-lr scales it)']


def test_what_is_taken_of_two_recipes():
    """Of the same parameters the paper's word; heads of upstream keep theirs; gradients are clipped by either."""
    keys = dict(norm=dict(decay_mult=0.5), query=dict(lr_mult=10.0), backbone=dict(lr_mult=0.1))
    theirs = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02), paramwise_cfg=dict(custom_keys=keys))

    def made(task, name='ravlt_t', **more):
        return settings(task, {}, dict(optim_wrapper=dict(theirs, **more)), name=name)[0]['optim_wrapper']

    detector = made('mmdet')
    assert detector['paramwise_cfg'] == dict(custom_keys=dict(norm=dict(decay_mult=0.0), query=dict(lr_mult=10.0)))
    assert list(detector) == ['type', 'optimizer', 'paramwise_cfg'] and detector['optimizer']['betas'] == (0.9, 0.999)
    assert made('mmseg', paramwise_cfg={})['paramwise_cfg'] == dict(norm_decay_mult=0.0)
    assert 'clip_grad' not in made('mmpretrain')
    assert made('mmpretrain', 'inline_deit_t')['clip_grad'] == dict(max_norm=5.0)
    assert made('mmpretrain', 'inline_deit_t', clip_grad=dict(max_norm=1.0))['clip_grad'] == dict(max_norm=1.0)


def test_precision_is_a_matter_of_the_tools():
    for kind, said in (
        (dict(type='AmpOptimWrapper'), 1),
        (dict(type='mmengine.AmpOptimWrapper'), 1),
        (dict(type='OptimWrapper'), 0),
        ({}, 0),
    ):
        found, remarks = settings('mmdet', {}, dict(optim_wrapper=dict(kind, optimizer=dict(type='SGD', lr=0.02))))
        assert found['optim_wrapper']['type'] == 'OptimWrapper'
        assert (
            remarks[:-1]
            == ['mixed precision is a switch of the tools here (--amp), so that the file also trains on a CPU'] * said
        )


def test_how_optimizers_are_named():
    given = dict(weight_decay=0.0, betas=(0.9, 0.99), lr=0, type='SGD')
    assert swap._named(given) == 'SGD lr=0 weight_decay=0.0' and swap._named({}) == ''


def test_schedules_in_proportion():
    def rescaled(*given, factor=0.01):
        return swap._rescaled(Config(dict(param_scheduler=list(given))), factor)

    cosine = dict(type='CosineAnnealingLR', eta_min=0.0123456, _scope_='mmdet')
    assert rescaled(dict(type='LinearLR'), cosine) == [
        dict(type='LinearLR'),
        dict(type='CosineAnnealingLR', eta_min=1.23e-4),
    ]
    assert rescaled(dict(type='OneCycleLR', eta_max=2.0), factor=0.5) == [dict(type='OneCycleLR', eta_max=1.0)]
    assert rescaled(dict(type='PolyLR', eta_min=0)) is None and rescaled(cosine, factor=1) is None
    assert swap._rescaled(Config(dict(param_scheduler=cosine)), 2) == [dict(type='CosineAnnealingLR', eta_min=0.0247)]
    assert swap._rescaled(Config({}), 2) is None


def test_the_file():
    cfg = dict(data_preprocessor=dict(mean=[0.0]), optim_wrapper=dict(type='OptimWrapper'))
    source = upstream_of(dict(type='M', neck=dict(type='N', x=1)), **cfg)
    before = source.model
    assert before['data_preprocessor'] == dict(mean=[0.0])
    after = dict(before, neck=dict(type='N', x=2), data_preprocessor=dict(mean=[1.0]))
    beside = dict(
        custom_imports=dict(imports=['mmlinattn']),
        custom_hooks=Code('[]'),
        load_from=None,
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW')),
    )
    assert swap._text(source, 'ravlt_t', before, after, beside) == (
        '# mmdet::folder/config.py with ravlt_t, by tools/swap_backbone.py of mmlinattn\n'
        "_base_ = 'mmdet::folder/config.py'\n"
        '\n'
        "custom_imports = dict(imports=['mmlinattn'])\n"
        'custom_hooks = []\n'
        '\n'
        'model = dict(neck=dict(x=2))\n'
        'data_preprocessor = dict(mean=[1.0])\n'
        'load_from = None\n'
        "optim_wrapper = dict(_delete_=True, type='OptimWrapper', optimizer=dict(type='AdamW'))\n"
    )
    # a preprocessor within the model is changed there
    inside = upstream_of(dict(type='M', data_preprocessor=dict(mean=[0.0])))
    text = swap._text(inside, 'x', inside.model, dict(inside.model, data_preprocessor=dict(mean=[1.0])), beside)
    assert 'model = dict(data_preprocessor=dict(mean=[1.0]))' in text and '\ndata_preprocessor' not in text
    both = upstream_of(dict(type='M', data_preprocessor=dict(mean=[0.0])), data_preprocessor=dict(mean=[5.0]))
    assert swap._text(both, 'x', both.model, dict(both.model, data_preprocessor=dict(mean=[1.0])), beside) == text


@pytest.mark.parametrize('base', ["/of/o'neill/config.py", '/a\\new/config.py', "/'both'\"/config.py"])
def test_the_file_inherits_from_any_path(base):
    """Quotes and backslashes are part of names."""
    source = upstream_of(dict(type='M'))._replace(base=base)
    beside = dict(custom_imports=dict(imports=['mmlinattn']), custom_hooks=Code('[]'))
    found = {}
    exec(swap._text(source, 'ravlt_t', source.model, source.model, beside), found)
    assert found['_base_'] == base


def test_a_file_that_says_something_else_is_not_kept_in_silence(tmp_path):
    path = tmp_path / 'file.py'
    path.write_text("model = dict(type='M', _scope_='mmdet', x=(1, 2), y=3, n=[dict(h=(dict(a=1, _scope_='s'),))])\n")
    source = upstream_of(dict(type='M'))
    necks = [dict(h=[dict(a=1)], _scope_='mmdet')]
    swap._check_file(path, source, dict(type='M', x=[1, 2], y=3, n=necks))
    with pytest.raises(RunError) as error:
        swap._check_file(path, source, dict(type='M', x=(1, 2), y=4, n=[dict(h=(dict(a=1, _scope_='s'),))]))
    assert str(error.value) == f'{path} does not hold the model that was tried: y: 4 -> 3'


# ---------------------------------------------------------------------------------- text and changes


def test_what_changed_line_by_line():
    old = dict(a=1, b=dict(type='X', c=2, d=3), e=[dict(f=1), dict(f=2)], g=[1, 2], h=dict(type='P'), gone=4, t=(1,))
    new = dict(a=1, b=dict(type='X', c=5, d=3), e=[dict(f=1), dict(f=3)], g=[1], h=dict(type='Q', arch='big'), t=[1])
    assert changes(old, dict(new, new=None, long='x' * 90)) == [
        'b.c: 2 -> 5',
        'e[1].f: 2 -> 3',
        'g: [1, 2] -> [1]',
        'h: P -> Q big',
        't: (1,) -> [1]',
        f"long: None -> '{'x' * 56}...",
        'gone: 4 -> None',
    ]
    assert changes(dict(a=dict(b=1)), dict(a=2)) == ['a: dict -> 2']
    assert changes(dict(a=0), dict(a=False)) == ['a: 0 -> False']
    assert changes(dict(a='x' * 58), dict(a='y' * 59)) == [f"a: '{'x' * 58}' -> '{'y' * 56}..."]  # 60 columns
    assert changes(dict(a=[dict(b=1)]), dict(a=[dict(b=1), 2])) == ["a: [{'b': 1}] -> [{'b': 1}, 2]"]


def test_differences_of_types_and_of_dicts_that_lose_a_key():
    assert difference(dict(a=1, b=(1,)), dict(a=True, b=(1,))) == dict(a=True)
    assert difference(dict(a=dict(x=1, _scope_='s')), dict(a=dict(x=2))) == dict(a=dict(x=2))
    assert difference(dict(a=dict(type='A', x=1)), dict(a=dict(type='B', x=1))) == dict(
        a=dict(_delete_=True, type='B', x=1)
    )
    assert difference({}, dict(a=dict(type='A'))) == dict(a=dict(type='A'))  # there is nothing to delete
    assert difference({}, dict(a=None)) == dict(a=None) and difference(dict(a=1), {}) == {}
    assert difference(dict(a=dict(b=1)), dict(a={})) == dict(a=dict(_delete_=True))
    assert difference(dict(a=dict(b=1)), dict(a=0)) == dict(a=0)
    assert difference(dict(a=dict(b=dict(c=1, d=1))), dict(a=dict(b=dict(c=1, d=2)))) == dict(a=dict(b=dict(d=2)))


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        ((1,), '(1,)'),
        ((1, 'a'), "(1, 'a')"),
        ([], '[]'),
        ((), '()'),
        ({}, 'dict()'),
        ({1: 2}, '{1: 2}'),
        (dict(a=None, b=[1.5]), 'dict(a=None, b=[1.5])'),
        ({'a.b': 1}, "{'a.b': 1}"),
        ({'lambda': 1}, "{'lambda': 1}"),
        (Code('*_base_.x'), '*_base_.x'),
        (dict(a='x' * 100, b=('y' * 20,)), f"dict(\n    a='{'x' * 100}',\n    b=('{'y' * 20}',),\n)"),
        ([['z' * 60] * 2], '[\n    [\n' + f"        '{'z' * 60}',\n" * 2 + '    ],\n]'),
        ({'a-b': 'x' * 60, 'c': ('y' * 60,)}, f"{{\n    'a-b': '{'x' * 60}',\n    'c': ('{'y' * 60}',),\n}}"),
    ],
)
def test_values_as_text(value, text):
    assert as_text(value) == text


def test_a_line_is_110_columns_at_most():
    value = ['a' * 50, 'b' * 49]  # 107 columns
    assert as_text(value, 0, 3) == repr(value) and '\n' in as_text(value, 0, 4) and '\n' in as_text(value, 4)


# ------------------------------------------------------------------------------------------- the zoo


def test_a_backbone_is_that_of_the_tasks_config():
    """Batch norms are synchronised in detectors; a size for larger pictures starts from the smaller one's weights."""
    numbers = torch.get_rng_state()
    detector, classifier = (zoo.find_backbone('ravlt_t', task) for task in ('mmdet', 'mmpretrain'))
    assert detector.cfg == dict(type='RAVLT', arch='tiny', norm_cfg=dict(type='SyncBN'))
    assert 'norm_cfg' not in classifier.cfg and classifier.stages == OURS and not classifier.plain
    assert classifier.checkpoint == 'mmlinattn://ravlt_t'
    larger = zoo.find_backbone('inline_swin_b_384', 'mmdet')  # of which there are classifiers only
    assert larger.checkpoint == 'mmlinattn://inline_swin_b' and larger.cfg['arch'] == 'inline-base-384'
    deit = zoo.find_backbone('hydra_deit_t', 'mmpretrain')
    assert torch.equal(torch.get_rng_state(), numbers)  # nothing was initialised
    assert deit.plain and deit.stages == (FeatureMap(192, 16),) and deit.checkpoint is None


def test_an_unknown_backbone_is_named_with_those_there_are():
    with pytest.raises(RunError) as error:
        zoo.find_backbone('ravlt_z', 'mmdet')
    said = str(error.value)
    assert said.startswith("BACKBONE is 'ravlt_z'; did you mean ravlt_") and said.count('did you mean') == 1
    assert said.partition('Allowed are: ')[2] == ', '.join(zoo.backbone_names())
    with pytest.raises(RunError) as error:
        zoo.find_backbone('%%%', 'mmdet')
    assert str(error.value).startswith("BACKBONE is '%%%'; Allowed are: angular_deit_t")
    assert zoo.backbone_names() == sorted(set(zoo.backbone_names()))


def test_recipes_without_a_row_of_their_own():
    """Another size of the same host, and failing that RAVLT's; of several recipes the preferred one."""
    first = {task: zoo.recipe('ravlt_t', task) for task in ('mmdet', 'mmseg', 'mmpretrain')}
    assert [cfg.model.type for cfg in first.values()] == ['MaskRCNN', 'EncoderDecoder', 'ImageClassifier']
    assert first['mmseg'].model.decode_head.type == 'UPerHead'
    several = zoo.recipe('ravlt_b', 'mmdet')  # of which the schedule of 12 epochs stands for all
    assert (several.model.type, several.train_cfg.max_epochs) == ('MaskRCNN', 12)
    assert zoo.recipe('ravlt_t', 'mmseg', 'fpn_80k').model.decode_head.type == 'FPNHead'
    assert zoo.recipe('ravlt_t', 'mmdet', 'retinanet_1x').model.type == 'RetinaNet'
    assert zoo.recipe('inline_swin_x', 'mmseg').model.backbone.type == 'LinearSwin'
    assert zoo.recipe('hydra_deit_t', 'mmseg').model.backbone.type == 'RAVLT'
    with pytest.raises(RunError, match='^no config in .*configs trains a backbone for mmpose$'):
        zoo.recipe('ravlt_t', 'mmpose')


@pytest.mark.parametrize(
    ('name', 'task', 'preferred', 'found'),
    [
        ('rala_swin_x', 'mmdet', 'retinanet_1x', 'rala_swin_._retinanet_1x'),
        ('rala_swin_x', 'mmdet', None, 'rala_swin_._maskrcnn_1x'),
        ('hydra_deit_t', 'mmseg', 'fpn_80k', 'ravlt_._fpn_80k'),
        ('hydra_deit_t', 'mmseg', None, 'ravlt_._upernet_160k'),
        ('inline_deit_b', 'mmdet', 'retinanet_1x', 'inline_deit_t_maskrcnn_1x'),  # of its host there is no other
    ],
)
def test_the_preferred_recipe_of_another_size_or_host(name, task, preferred, found, monkeypatch):
    monkeypatch.setattr(zoo, 'Config', SimpleNamespace(fromfile=lambda path: Path(path).stem))
    assert re.fullmatch(found, zoo.recipe(name, task, preferred))
