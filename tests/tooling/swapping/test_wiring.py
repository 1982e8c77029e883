# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Values of configs for other feature maps, and whole networks, without building a detector."""

import pytest
from mmengine.registry import init_default_scope

from mmlinattn.tooling.swapping.candidates import candidates
from mmlinattn.tooling.swapping.measuring import Measured
from mmlinattn.tooling.swapping.wiring import Wiring, assign_stages, positions_read
from mmlinattn.tooling.swapping.zoo import FeatureMap, ZooBackbone

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)

RESNET = [FeatureMap(256 * 2**i, 4 * 2**i) for i in range(4)]
DILATED = [FeatureMap(256, 4), FeatureMap(512, 8), FeatureMap(1024, 8), FeatureMap(2048, 8)]
OURS = tuple(FeatureMap(64 * 2**i, 4 * 2**i) for i in range(4))
PYRAMID = ZooBackbone('ours', dict(type='RAVLT', arch='tiny'), None, OURS, plain=False)
PLAIN = ZooBackbone('plain', dict(type='LinearDeiT', arch='inline-tiny'), None, (FeatureMap(192, 16),), plain=True)
OLD, NEW = [256, 512, 1024, 2048], [64, 128, 256, 512]
POOL = dict(type='GlobalAveragePooling')
FPN = dict(type='FPN', in_channels=OLD, out_channels=256, num_outs=5)


@pytest.mark.parametrize(
    'old, deepest_last, chosen',
    [
        (RESNET, False, [0, 1, 2, 3]),
        (DILATED, True, [0, 1, 2, 3]),
        ([FeatureMap(1024, 16)], False, [2]),  # a detector's C4
        ([FeatureMap(16, 2), FeatureMap(24, 4), FeatureMap(960, 8)], True, [0, 1, 3]),  # a segmentor's last map
        ([FeatureMap(1024, 8), FeatureMap(2048, 8)], False, [1, 2]),  # of equally good ones the deeper
        (RESNET[::-1], True, None),
        ([FeatureMap(8, 4 * 2**i) for i in range(5)], True, None),
    ],
)
def test_stages_replace_maps_by_stride(old, deepest_last, chosen):
    assert assign_stages(old, OURS, deepest_last) == chosen


@pytest.mark.parametrize(
    ('node', 'keep', 'expected'),
    [
        (dict(in_channels=(512, 1024)), None, dict(in_channels=(128, 256))),  # some that follow one another; a tuple
        (dict(in_channels=[256, 1024]), None, None),
        (dict(in_channels=[1024, 2048]), [1, 3], dict(in_channels=[512])),
        (dict(in_channels=OLD[::-1]), [1, 3], dict(in_channels=[512, 128])),
        (dict(in_channels=[256, 1024], in_index=(0, 2)), [0, 2], dict(in_channels=[64, 256], in_index=(0, 1))),
        (dict(in_channels=[256, 512], in_index=(0, 2)), None, None),
        (dict(in_channels=1024, in_index=-2), [2, 3], dict(in_channels=256, in_index=0)),
        (dict(in_channels=512, in_index=0), None, None),  # not that map's
        (dict(in_channels=512, c1_in_channels=512), None, dict(in_channels=128, c1_in_channels=512)),
        (dict(in_planes=1024, head_inplanes=512), None, dict(in_planes=256, head_inplanes=128)),
        (dict(in_channels=None, in_channels_scale=256, out_channels=256), None, None),
        (dict(in_channels=[], strides=[4, 8], main_channels=256), None, None),
        (dict(strides=(4, 8, 16, 32), in_strides=[4, 8, 16, 32]), [1, 2], dict(strides=(8, 16), in_strides=[8, 16])),
        (dict(featmap_strides=[4, 8, 16, 32]), [2, 3], dict(featmap_strides=[16, 32])),
        (dict(feature_strides=[4, 8, 16, 32]), [2, 3], dict(feature_strides=[16, 32])),
        (dict(start_level=2, end_level=3), [1, 2, 3], dict(start_level=1, end_level=2)),
        (dict(start_level=0, end_level=-1), [1, 2, 3], None),
        (dict(bbox_roi_extractor=dict(out_channels=1024)), None, dict(bbox_roi_extractor=dict(out_channels=256))),
        ([dict(in_channels=256), 'as it is'], None, [dict(in_channels=64), 'as it is']),
        (dict(train_cfg=dict(in_channels=256), data_preprocessor=dict(in_channels=256)), None, None),
        (dict(test_cfg=dict(in_channels=256), x=dict(backbone=dict(in_channels=256))), None, None),
        (dict(in_channels=[256, 2048], in_index=[0, -1]), [0, 3], dict(in_channels=[64, 512], in_index=[0, 1])),
        (dict(in_channels=[256, 2048], in_index=[-4, 3]), None, dict(in_channels=[64, 512], in_index=[-4, 3])),
        # maps that only the neck makes
        (dict(in_channels=40, in_index=[3, 4, 5]), None, None),
    ],
)
def test_values_of_a_config(node, keep, expected):
    assert Wiring(RESNET, OURS, keep)(node) == (node if expected is None else expected)


def test_single_numbers_deep_inside():
    """Keep single channel counts if several feature maps are read: decoders often equal one by chance."""
    node = dict(in_channels=512, decoder=dict(in_channels=512), indexed=dict(in_channels=2048, in_index=3))
    wired = Wiring(RESNET, OURS, deep=False)(node)
    assert wired == dict(in_channels=128, decoder=dict(in_channels=512), indexed=dict(in_channels=512, in_index=3))
    assert Wiring(RESNET, OURS)(node)['decoder'] == dict(in_channels=128)
    head = dict(in_channels=OLD, in_index=[0, 1, 2, 3], decoder=dict(in_channels=512))
    found = made(dict(decode_head=head), RESNET, PYRAMID, 'mmseg')['decode_head']
    assert found == dict(head, in_channels=NEW)


def made(network, old, backbone, task, number=0, alone=None):
    """Return the config of a candidate."""
    init_default_scope(task)
    network = dict(network, backbone=dict(type='ResNet'))
    return candidates(network, Measured(list(old), (256, 256), alone), backbone, task)[number].network


@pytest.mark.parametrize(
    ('network', 'positions'),
    [
        (dict(neck=FPN), [0, 1, 2, 3]),
        (dict(neck=[dict(FPN, start_level=2), POOL], decode_head=dict(in_channels=256, in_index=0)), [2, 3]),
        (dict(decode_head=dict(in_channels=2048), auxiliary_head=[dict(in_channels=256, in_index=0)]), [0, 3]),
        (dict(decode_head=dict(in_channels=2048, in_index=-1, c1_in_channels=256)), [0, 3]),
        (dict(decode_head=[dict(in_channels=[512, 1024], in_index=[1, 2]), dict(in_channels=OLD[:1])]), [0, 1, 2, 3]),
        (dict(panoptic_head=dict(in_channels=OLD, pixel_decoder=dict(type='D'))), [0, 1, 2, 3]),
        (dict(decode_head=dict(inner=[dict(in_index=3)]), auxiliary_head=dict(in_channels=9, in_index=2)), [2, 3]),
        (dict(teacher=dict(in_channels=256, in_index=1), bbox_head=dict(type='H')), [0, 1, 2, 3]),
    ],
)
def test_positions_of_the_maps_that_are_read(network, positions):
    assert positions_read(network, 4) == positions


def test_unread_maps_are_not_returned():
    found = made(dict(neck=dict(FPN, start_level=1)), RESNET, PYRAMID, 'mmdet')
    assert found['neck'] == dict(FPN, in_channels=NEW[1:], start_level=0)
    assert found['backbone']['out_indices'] == (1, 2, 3)
    head = dict(type='FCNHead', in_channels=2048, in_index=3)
    found = made(dict(decode_head=head), DILATED, PYRAMID, 'mmseg')
    assert found['decode_head'] == dict(head, in_channels=512, in_index=0) and found['backbone']['out_indices'] == (3,)
    heads = dict(decode_head=head, auxiliary_head=dict(type='FCNHead', in_channels=1024, in_index=2))
    adapter = made(heads, RESNET, PYRAMID, 'mmseg', number=1)['neck']
    assert adapter == dict(type='MapAdapter', in_channels=[256, 512], out_channels=OLD, sources=[None, None, 0, 1])


def test_heads_behind_a_neck_are_followed():
    """Take the channels of an FPN from its settings, and those of a pooling neck from the backbone."""
    head = dict(type='FCNHead', in_channels=256, in_index=0)
    assert made(dict(neck=FPN, decode_head=head), RESNET, PYRAMID, 'mmseg')['decode_head'] == head
    pool = dict(type='GlobalAveragePooling')
    reid = dict(neck=dict(pool, kernel_size=(8, 8), stride=1), head=dict(type='LinearReIDHead', in_channels=2048))
    assert made(reid, RESNET[3:], PYRAMID, 'mmdet')['head']['in_channels'] == 512
    jpu = dict(type='JPU', in_channels=(512, 1024, 2048), mid_channels=512)
    heads = dict(decode_head=dict(in_channels=2048, in_index=2), auxiliary_head=dict(in_channels=1024, in_index=1))
    found = made(dict(neck=jpu, **heads), RESNET[1:], PYRAMID, 'mmseg')
    assert found['neck']['in_channels'] == (128, 256, 512)
    assert found['decode_head']['in_channels'] == 2048
    assert found['auxiliary_head']['in_channels'] == 256  # an input, passed on


def test_a_neck_that_made_a_pyramid_of_plain_maps_goes():
    plain = [FeatureMap(768, 16)] * 4
    neck = dict(type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5])
    head = dict(in_channels=[768] * 4, in_index=[0, 1, 2, 3])
    found = made(dict(neck=neck, decode_head=head), plain, PYRAMID, 'mmseg')
    assert found['neck'] is None and found['decode_head']['in_channels'] == NEW


@pytest.mark.parametrize(
    ('old', 'task', 'alone', 'scales', 'sources'),
    [
        (RESNET[:2] + [FeatureMap(100, 64)], 'mmdet', None, [1, 1, 0.5], [0, 1, 2]),  # anchors depend on strides
        ([FeatureMap(128, 8), FeatureMap(16, 4)], 'mmseg', None, [1, 8], [0, 1]),  # a decoder
        ([FeatureMap(64, 8), FeatureMap(128, 8)], 'mmseg', 1, [1, 4], [0, 1]),  # inference returns one feature map
    ],
)
def test_adapters_make_maps_like_upstreams(old, task, alone, scales, sources):
    neck = made({}, old, PYRAMID, task, alone=alone)['neck']
    assert neck['type'] == 'MapAdapter' and neck['out_channels'] == [out.channels for out in old]
    assert neck['scales'] == scales and neck.get('sources', sources) == sources
    assert neck.get('inference_output') == alone


@pytest.mark.parametrize(
    ('neck', 'old', 'kind'),
    [
        (FPN, RESNET, 'SimpleFeaturePyramid'),
        (dict(FPN, start_level=1), RESNET, 'MapAdapter'),
        (dict(FPN, add_extra_convs='on_input'), RESNET, 'MapAdapter'),
        (dict(FPN, type='PAFPN'), RESNET, 'MapAdapter'),
        (None, [FeatureMap(768, 16)] * 4, None),
    ],
)
def test_plain_backbones(neck, old, kind):
    found = made(dict(neck=neck), old, PLAIN, 'mmdet')
    first = found['neck'][0] if isinstance(found['neck'], list) else found['neck']
    assert found['backbone']['out_type'] == 'featmap' and (first and first['type']) == kind
    if kind is None:  # as many of its blocks, evenly
        assert found['backbone']['out_indices'] == (2, 5, 8, 11)


@pytest.mark.parametrize(
    ('neck', 'old', 'backbone', 'expected'),
    [
        (POOL, RESNET[3:], PYRAMID, (POOL, 512)),
        (None, RESNET[3:], PYRAMID, (None, 512)),
        (None, [FeatureMap(2048, None)], PYRAMID, (POOL, 512)),  # the head reads vectors
        (None, [FeatureMap(2048, None)], PLAIN, (None, 192)),
        (POOL, [FeatureMap(2048, 16)], PLAIN, (None, 192)),  # the class token
    ],
)
def test_classifiers(neck, old, backbone, expected):
    network = dict(neck=neck, head=dict(type='LinearClsHead', num_classes=7, in_channels=2048))
    found = made(network, old, backbone, 'mmpretrain')
    assert (found['neck'], found['head']['in_channels']) == expected


def test_a_linear_head_replaces_heads_of_other_inputs():
    head = dict(type='DeiTClsHead', num_classes=7, in_channels=2048, topk=(1, 5), other=1)
    found = made(dict(head=head), [FeatureMap(2048, None)], PYRAMID, 'mmpretrain', number=1)
    assert found['head'] == dict(type='LinearClsHead', num_classes=7, in_channels=512, topk=(1, 5))
    assert found['neck'] == dict(type='GlobalAveragePooling') and found['backbone']['out_indices'] == (3,)


def test_self_supervised_necks_average_maps_in_place_of_tokens():
    neck = dict(type='NonLinearNeck', in_channels=384, hid_channels=8, out_channels=8, with_avg_pool=False)
    found = made(dict(neck=neck, head=dict(type='M')), [FeatureMap(384, None)], PYRAMID, 'mmpretrain')
    assert (found['neck']['in_channels'], found['neck']['with_avg_pool']) == (512, True)


def test_teachers_read_backbones_of_their_own():
    network = dict(rpn_head=dict(in_channels=1024), teacher_bbox_head=dict(in_channels=1024))
    found = made(network, RESNET[2:3], PYRAMID, 'mmdet')
    assert (found['rpn_head']['in_channels'], found['teacher_bbox_head']['in_channels']) == (256, 1024)
