# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Any backbone in any upstream config: what is rewired, and that the written file trains."""

import runpy
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from config_helpers import ROOT
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from test_configs_training import training_batch

from mmlinattn.necks import MapAdapter
from mmlinattn.swapping import NoModel, NoPlace, backbone_names, swap_backbone
from mmlinattn.swapping.rewiring import Wiring, assign_stages, plans
from mmlinattn.swapping.swap import _settings, without_whole_weights
from mmlinattn.swapping.upstream import read_upstream, without_weights
from mmlinattn.swapping.writing import as_text, changes, difference
from mmlinattn.swapping.zoo import FeatureMap, ZooBackbone, find_backbone, recipe
from mmlinattn.utils.errors import RunError

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)

RESNET = [FeatureMap(256 * 2**i, 4 * 2**i) for i in range(4)]
DILATED = [FeatureMap(256, 4), FeatureMap(512, 8), FeatureMap(1024, 8), FeatureMap(2048, 8)]
TINY = [FeatureMap(64 * 2**i, 4 * 2**i) for i in range(4)]


@pytest.fixture
def swap(tmp_path):
    def run(upstream, backbone, **kwargs):
        out = tmp_path / 'swapped.py'
        swapped = swap_backbone(upstream, backbone, out, **kwargs)
        assert swapped.trial.without_gradient == ()
        return swapped, Config.fromfile(out)

    return run


def train_a_step(cfg):
    """Independent of the library's own trial: the file's model with the data of the other tests of configs."""
    init_default_scope(cfg.default_scope)
    if cfg.default_scope == 'mmseg':
        cfg.model.data_preprocessor.size = (64, 64)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    model = MODELS.build(cfg.model)
    model.train()
    data = model.data_preprocessor(training_batch(cfg.default_scope), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, p in model.backbone.named_parameters() if p.grad is None] == []


# The pieces


@pytest.mark.parametrize(
    'old, deepest_last, chosen',
    [
        (RESNET, False, (0, 1, 2, 3)),
        (RESNET[1:], False, (1, 2, 3)),
        (DILATED, True, (0, 1, 2, 3)),
        ([FeatureMap(2048, 32)], False, (3,)),
        ([FeatureMap(1024, 16)], False, (2,)),  # a detector's C4
        ([FeatureMap(384, 16)], True, (3,)),  # a segmentor's last map
        ([FeatureMap(16, 2), FeatureMap(24, 4), FeatureMap(960, 8)], True, (0, 1, 3)),
        ([FeatureMap(768, 16)] * 4, True, (0, 1, 2, 3)),
        ([FeatureMap(1024, 8), FeatureMap(2048, 8)], False, (1, 2)),  # of equally good ones the deeper
        (RESNET[::-1], True, None),
        ([FeatureMap(8, 4 * 2**i) for i in range(5)], True, None),
    ],
)
def test_stages_stand_in_by_stride(old, deepest_last, chosen):
    assert assign_stages(old, TINY, deepest_last) == chosen


@pytest.mark.parametrize(
    'node, keep, expected',
    [
        (dict(in_channels=[256, 512, 1024, 2048]), None, dict(in_channels=[64, 128, 256, 512])),
        (dict(in_channels=[2048, 1024, 512, 256]), None, dict(in_channels=[512, 256, 128, 64])),
        (
            dict(in_channels=[256, 512, 1024, 2048], start_level=1, num_outs=5),
            [1, 2, 3],
            dict(in_channels=[128, 256, 512], start_level=0, num_outs=5),
        ),
        (dict(in_channels=2048, in_index=3, channels=512), None, dict(in_channels=512, in_index=3, channels=512)),
        (dict(in_channels=1024, in_index=2), [2, 3], dict(in_channels=256, in_index=0)),
        (dict(in_channels=2048, in_index=-1), [2, 3], dict(in_channels=512, in_index=-1)),
        (
            dict(in_channels=[1024, 2048], in_index=[2, 3]),
            [2, 3],
            dict(in_channels=[256, 512], in_index=[0, 1]),
        ),
        (
            dict(in_channels=2048, in_index=3, c1_in_channels=256),
            [0, 3],
            dict(in_channels=512, in_index=1, c1_in_channels=64),
        ),
        (dict(in_channels=3840), None, dict(in_channels=960)),  # all maps, concatenated
        (dict(in_channels=[256, 512, 1024, 2048], strides=[4, 8, 16, 32]), [3], dict(in_channels=[512], strides=[32])),
        (
            dict(inner=dict(in_channels=77), loss=dict(weight=256)),
            None,
            dict(inner=dict(in_channels=77), loss=dict(weight=256)),
        ),
    ],
)
def test_values_are_rewired(node, keep, expected):
    assert Wiring(RESNET, TINY, keep)(node) == expected


def test_numbers_deep_inside_may_be_left_alone():
    node = dict(in_channels=[256, 512, 1024, 2048], update=dict(in_channels=512))
    assert Wiring(RESNET, TINY)(node)['update'] == dict(in_channels=128)
    assert Wiring(RESNET, TINY, ints_below=0)(node) == dict(
        in_channels=[64, 128, 256, 512], update=dict(in_channels=512)
    )


def test_adapter_makes_the_maps_that_are_expected():
    neck = MapAdapter([4, 8], [6, 16, 3], sources=[0, 1, None], scales=[1, 2, 1])
    first, second = torch.rand(2, 4, 5, 7), torch.rand(2, 8, 3, 4)
    outs = neck((first, second))
    assert [tuple(out.shape) for out in outs] == [(2, 6, 5, 7), (2, 16, 6, 8), (2, 3, 1, 1)]
    torch.testing.assert_close(outs[0], neck.convs[0](first))
    with pytest.raises(ValueError, match='widths'):
        neck((first, first))
    halves = MapAdapter([4, 8], [6, 16], scales=[0.5, 1])((first, second))
    assert [tuple(out.shape[2:]) for out in halves] == [(3, 4), (3, 4)]  # as strided convolutions round
    neck.inference_output = 1
    torch.testing.assert_close(neck.eval()((first, second)), outs[1])
    assert len(neck.train()((first, second))) == 3
    with pytest.raises(ValueError, match='inference_output=3'):
        MapAdapter([4], [6], inference_output=3)
    with pytest.raises(ValueError, match='sources'):
        MapAdapter([4], [6], sources=[1])


def test_maps_of_detectors_keep_their_strides():
    """Anchors lie by them. A pyramid that is shifted by one level trains as well, and finds nothing where it is."""
    old = [FeatureMap(256, 8), FeatureMap(512, 16), FeatureMap(768, 32), FeatureMap(1024, 64)]
    neck = dict(type='CSPNeXtPAFPN', in_channels=[256, 512, 768, 1024])
    network = dict(backbone=dict(type='CSPNeXt'), neck=neck, bbox_head=dict(strides=[8, 16, 32, 64]))
    backbone = find_backbone('ravlt_t', 'mmdet')
    (plan,) = plans(network, old, backbone, 'mmdet')
    adapter, rest = plan.network['neck']
    assert plan.network['backbone']['out_indices'] == (1, 2, 3) and rest == neck
    assert adapter['in_channels'] == [128, 256, 512] and adapter['sources'] == [0, 1, 2, 2]
    assert adapter['scales'] == [1, 1, 1, 0.5] and adapter['out_channels'] == neck['in_channels']
    assert 'strides 8 16 32 64' in plan.remark
    # one map of another stride is enough, as of networks that dilate the last stage
    dilated = [*RESNET[:3], FeatureMap(2048, 16)]
    (plan,) = plans(dict(network, neck=None), dilated, backbone, 'mmdet')
    adapter = plan.network['neck']
    assert plan.network['backbone']['out_indices'] == (0, 1, 2) and 'strides 4 8 16 16' in plan.remark
    assert adapter['sources'] == [0, 1, 2, 2] and 'scales' not in adapter
    # segmentors resize what they predict
    first = next(plans(dict(network, neck=None), old, backbone, 'mmseg'))
    assert first.network['backbone'].get('out_indices', (0, 1, 2, 3)) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    'neck, first',
    [
        (dict(type='FPN', num_outs=5), 'SimpleFeaturePyramid'),
        (dict(type='mmdet.FPN', num_outs=4, start_level=0), 'SimpleFeaturePyramid'),
        (dict(type='PAFPN', num_outs=5), 'MapAdapter'),
        (dict(type='FPN', num_outs=5, add_extra_convs='on_output'), 'MapAdapter'),
        (dict(type='FPN', num_outs=5, start_level=1), 'MapAdapter'),
    ],
)
def test_plain_backbone_takes_the_place_of_a_plain_pyramid_only(neck, first):
    """What a neck does beyond FPN is not to be lost in silence."""
    neck = dict(neck, in_channels=[256, 512, 1024, 2048], out_channels=256)
    backbone = ZooBackbone('plain', dict(type='LinearDeiT'), None, (FeatureMap(192, 16),), plain=True)
    plan = next(plans(dict(backbone=dict(type='ResNet'), neck=neck), RESNET, backbone, 'mmdet'))
    necks = plan.network['neck']
    assert (necks[0] if isinstance(necks, list) else necks)['type'] == first
    assert first != 'MapAdapter' or necks[1] == neck


def test_last_of_all_a_segmentor_gets_maps_of_upstreams_strides():
    """LR-ASPP pools windows of 49 x 49, which maps of stride 32 do not have."""
    old = [FeatureMap(16, 2), FeatureMap(16, 4), FeatureMap(576, 8)]
    network = dict(backbone=dict(type='MobileNetV3'), decode_head=dict(in_channels=[16, 16, 576], in_index=[0, 1, 2]))
    *_, widths, both = plans(network, old, find_backbone('ravlt_t', 'mmseg'), 'mmseg')
    assert widths.network['neck'] == dict(type='MapAdapter', in_channels=[64, 128, 512], out_channels=[16, 16, 576])
    assert both.network['neck'] == dict(widths.network['neck'], scales=[2.0, 2.0, 4.0])
    assert 'widths and strides' in both.remark and 'strides' not in widths.remark


@pytest.mark.slow
def test_norms_that_only_distributed_runs_have_are_tried_as_others(swap):
    name = 'mask-rcnn_r50-caffe_fpn_rpn-2conv_4conv1fc_syncbn-all_amp-lsj-100e_coco.py'
    _, cfg = swap(f'mmdet::strong_baselines/{name}', 'ravlt_t')
    assert cfg.model.roi_head.mask_head.norm_cfg.type == 'MMSyncBN'  # as upstream has it


def test_size_of_the_pictures_is_that_of_the_recipe():
    sizes = {
        'mmdet::reid/reid_r50_8xb32-6e_mot17train80_test-mot17val20.py': (256, 128),
        'mmseg::mobilenet_v3/mobilenet-v3-d8-s_lraspp_4xb4-320k_cityscapes-512x1024.py': (512, 1024),
        'mmdet::detr/detr_r50_8xb2-150e_coco.py': None,
    }
    assert {name: read_upstream(name).image_size for name in sizes} == sizes


def test_difference_is_what_the_child_has_to_say(tmp_path):
    old = dict(a=1, neck=dict(type='FPN', x=1, y=2), head=None, many=[dict(z=1)], same=dict(deep=[1]))
    new = dict(a=1, neck=dict(type='FPN', x=3), head=dict(type='H'), many=[dict(z=2)], same=dict(deep=[1]))
    assert difference(old, new) == dict(
        neck=dict(_delete_=True, type='FPN', x=3), head=dict(_delete_=True, type='H'), many=[dict(z=2)]
    )
    (tmp_path / 'base.py').write_text(f'model = {as_text(old)}\n')
    (tmp_path / 'child.py').write_text(f"_base_ = 'base.py'\nmodel = {as_text(difference(old, new), 0, 8)}\n")
    assert Config.fromfile(tmp_path / 'child.py').model == new
    assert changes(old, new)[0] == 'neck.x: 1 -> 3'


def test_long_values_are_broken_into_lines():
    value = dict(names=['a' * 30] * 5, plain=(1,), keys={'a.b': dict(c=None)}, numbers=list(range(60)))
    text = as_text(value)
    assert eval(text) == value
    assert max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) > 5


@pytest.mark.slow
def test_every_backbone_of_the_zoo_is_known():
    names = ['ravlt_t', 'inline_pvt_t', 'flatten_pvt_v2_b1', 'inline_swin_t', 'flatten_cswin_t', 'inline_deit_t']
    assert {*names, 'inline_swin_s', 'inline_swin_b_384'} <= set(backbone_names())
    for name in names:
        backbone = find_backbone(name, 'mmdet')
        assert backbone.stages[-1].stride == (16 if backbone.plain else 32)
        assert not {'out_indices', 'init_cfg', 'out_type'} & set(backbone.cfg)
    assert find_backbone('inline_swin_b_384', 'mmseg').checkpoint == 'mmlinattn://inline_swin_b'
    assert find_backbone('ravlt_b', 'mmdet').cfg['norm_cfg'] == dict(type='SyncBN')


def test_recipes_are_those_of_the_papers():
    assert recipe('ravlt_t', 'mmdet').optim_wrapper.optimizer.lr == 1e-4
    assert recipe('inline_pvt_s', 'mmdet').optim_wrapper.optimizer.lr == 2e-4
    assert recipe('ravlt_s', 'mmseg', 'fpn_80k').optim_wrapper.optimizer.weight_decay == 1e-4
    assert recipe('inline_deit_b', 'mmseg').optim_wrapper.optimizer.lr == 6e-5  # no row: RAVLT's


@pytest.mark.parametrize(
    'upstream, backbone, message',
    [
        ('mmdet::dino/dino-4scale_r50.py', 'ravlt_t', 'did you mean mmdet::dino/dino-4scale_r50_8xb2-'),
        ('mmpose::a/b.py', 'ravlt_t', 'allowed before :: are: mmdet, mmseg, mmpretrain'),
        ('nowhere.py', 'ravlt_t', 'no such file'),
        ('mmdet::_base_/datasets/coco_detection.py', 'ravlt_t', 'has no model'),
        ('mmdet::detr/detr_r50_8xb2-150e_coco.py', 'ravlt_x', 'did you mean ravlt_'),
    ],
)
def test_mistakes_have_one_line(upstream, backbone, message):
    with pytest.raises(RunError) as error:
        swap_backbone(upstream, backbone)
    assert message in str(error.value) and '\n' not in str(error.value)


def test_parts_of_configs_are_told_by_the_type_of_the_error():
    with pytest.raises(NoModel):
        read_upstream('mmdet::_base_/datasets/coco_detection.py')


@pytest.mark.parametrize(
    'upstream, reason',
    [
        ('mmdet::cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco.py', 'hourglass'),
        ('mmdet::tridentnet/tridentnet_r50-caffe_1x_coco.py', 'three branches'),
        ('mmpretrain::mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k.py', 'masked image modelling'),
        ('mmpretrain::milan/milan_vit-base-p16_16xb256-amp-coslr-400e_in1k.py', 'masked image modelling'),
        ('mmpretrain::spark/spark_sparse-resnet50_8xb512-amp-coslr-800e_in1k.py', 'masked image modelling'),
        ('mmpretrain::dinov2/vit-small-p14_dinov2-pre_headless.py', 'it has no head'),
        ('mmseg::dpt/dpt_vit-b16_8xb2-160k_ade20k-512x512.py', 'a class token beside each map'),
        ('mmpretrain::clip/clip_vit-base-p16_zeroshot-cls_in1k.py', 'no backbone of its own'),
        ('mmdet::misc/d2_faster-rcnn_r50-caffe_fpn_ms-90k_coco.py', 'Detectron2Wrapper'),
    ],
)
def test_no_place_has_one_line(upstream, reason):
    with pytest.raises(NoPlace) as error:
        swap_backbone(upstream, 'ravlt_t')
    assert reason in str(error.value) and '\n' not in str(error.value)


# The families


def test_classifier(swap):
    swapped, cfg = swap('mmpretrain::resnet/resnet18_8xb16_cifar10.py', 'flatten_pvt_v2_b0')
    assert cfg.model.backbone.type == 'LinearPVTv2' and cfg.model.backbone.out_indices == (3,)
    assert cfg.model.backbone.init_cfg.checkpoint == 'mmlinattn://flatten_pvt_v2_b0'
    assert cfg.model.head.in_channels == 256 and cfg.model.head.num_classes == 10
    assert cfg.data_preprocessor.mean == [123.675, 116.28, 103.53]
    assert cfg.data_preprocessor.std == [58.395, 57.12, 57.375]
    assert cfg.data_preprocessor.to_rgb is False  # this data set's pictures are RGB as they come
    assert cfg.optim_wrapper.optimizer.type == 'AdamW'
    assert 'optimizer: SGD lr=0.1 weight_decay=0.0001 -> AdamW lr=0.001 weight_decay=0.05' in swapped.changes
    hooks = [hook.type for hook in cfg.custom_hooks]
    assert 'UnusedParametersHook' in hooks and 'mmlinattn' in cfg.custom_imports['imports']
    train_a_step(without_weights_in(cfg))


def test_settings_beside_the_model():
    """Rates of upstream's heads stay, those of its backbone go; rates at which schedules end follow the new one;
    weights of the whole go."""
    keys = {'backbone': dict(lr_mult=0.1), 'backbone.norm': dict(decay_mult=0.0), 'query': dict(lr_mult=10.0)}
    cfg = Config(
        dict(
            default_scope='mmdet',
            optim_wrapper=dict(
                type='AmpOptimWrapper',
                optimizer=dict(type='SGD', lr=0.02),
                paramwise_cfg=dict(custom_keys=keys),
                clip_grad=dict(max_norm=0.1),
            ),
            param_scheduler=[dict(type='LinearLR', start_factor=0.1), dict(type='CosineAnnealingLR', eta_min=0.002)],
            load_from='whole.pth',
        )
    )
    source = SimpleNamespace(cfg=cfg, model=dict(type='DINO'), task='mmdet')
    settings, remarks = _settings(source, find_backbone('ravlt_t', 'mmdet'), keep_optimizer=False)
    wrapper = settings['optim_wrapper']
    assert wrapper['type'] == 'OptimWrapper' and any('--amp' in remark for remark in remarks)
    assert (wrapper['optimizer']['type'], wrapper['optimizer']['lr']) == ('AdamW', 1e-4)
    found = wrapper['paramwise_cfg']['custom_keys']
    assert found['query'] == dict(lr_mult=10.0) and not [key for key in found if key.startswith('backbone')]
    assert wrapper['clip_grad'] == dict(max_norm=0.1)
    assert [each.get('eta_min') for each in settings['param_scheduler']] == [None, 1e-5]
    assert settings['load_from'] is None and settings['auto_scale_lr'] == dict(base_batch_size=16)
    kept, _ = _settings(source, find_backbone('ravlt_t', 'mmdet'), keep_optimizer=True)
    assert 'optim_wrapper' not in kept and 'param_scheduler' not in kept and kept['load_from'] is None


def without_weights_in(cfg):
    cfg.model = Config(dict(model=without_weights(cfg.model))).model
    return cfg


@pytest.mark.slow
def test_maps_that_a_neck_skips_are_not_returned(swap):
    _, cfg = swap('mmdet::retinanet/retinanet_r18_fpn_1x_coco.py', 'ravlt_t')
    assert cfg.model.backbone.out_indices == (1, 2, 3)
    assert cfg.model.neck.in_channels == [128, 256, 512] and cfg.model.neck.start_level == 0
    assert cfg.optim_wrapper.optimizer.weight_decay == 1e-4  # as RetinaNet was trained
    train_a_step(without_weights_in(cfg))


def test_folders_that_mmengine_does_not_take_are_inherited_all_the_same():
    upstream = read_upstream('mmdet::gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py')
    assert upstream.base == 'mmdet::_base_/../gn+ws/faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py'
    assert upstream.model['backbone']['type'] == 'ResNet'


def test_weights_of_the_whole_go_with_the_backbone(swap):
    """MMSegmentation's configs name ResNet's beside the backbone, and hand them to it when it is built."""
    _, cfg = swap('mmseg::sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512.py', 'flatten_pvt_v2_b0')
    assert cfg.model.pretrained is None
    init_default_scope('mmseg')
    model = MODELS.build(cfg.model)
    assert model.backbone.init_cfg.checkpoint == 'mmlinattn://flatten_pvt_v2_b0'

    weights = dict(type='Pretrained', checkpoint='detector.pth')
    tracker = dict(init_cfg=weights, detector=dict(init_cfg=[weights], backbone=dict(init_cfg=weights)), reid=dict(x=1))
    assert without_whole_weights(tracker, ('detector',)) == dict(
        init_cfg=None, detector=dict(init_cfg=None, backbone=dict(init_cfg=weights)), reid=dict(x=1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'upstream, backbone, expected',
    [
        # videos
        (
            'mmdet::mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2019.py',
            'flatten_pvt_v2_b0',
            {'track_head.in_channels': [32, 64, 160, 256]},
        ),
        # two stages; a path; the fork in colours
        (
            'mmdet::faster_rcnn/faster-rcnn_r50-caffe_fpn_1x_coco.py',
            'inline_swin_t',
            {'neck.in_channels': [96, 192, 384, 768], 'data_preprocessor.bgr_to_rgb': True},
        ),
        # query-based, several scales and one
        (
            'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
            'ravlt_t',
            {'backbone.out_indices': (1, 2, 3), 'neck.in_channels': [128, 256, 512]},
        ),
        ('mmdet::detr/detr_r50_8xb2-150e_coco.py', 'flatten_cswin_t', {'neck.in_channels': [512]}),
        # one stage, with a head that asks for the epoch
        ('mmdet::tood/tood_r50_fpn_1x_coco.py', 'ravlt_t', {'neck.in_channels': [128, 256, 512]}),
        # real time
        (
            'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
            'flatten_pvt_v2_b0',
            {'neck.in_channels': [64, 160, 256], 'data_preprocessor.bgr_to_rgb': True},
        ),
        ('mmdet::yolox/yolox_tiny_8xb8-300e_coco.py', 'inline_pvt_t', {'neck.in_channels': [128, 320, 512]}),
        # a backbone with a decoder of its own
        (
            'mmseg::bisenetv2/bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024.py',
            'ravlt_t',
            {'neck.type': 'MapAdapter', 'neck.out_channels': [128, 16, 32, 64, 128], 'decode_head.in_channels': 128},
        ),
        # branches in training, one of them in inference
        (
            'mmseg::ddrnet/ddrnet_23-slim_in1k-pre_2xb6-120k_cityscapes-1024x1024.py',
            'ravlt_t',
            {'neck.out_channels': [64, 128], 'neck.inference_output': 1, 'backbone.out_indices': (1, 3)},
        ),
        # a plain backbone in a network for pyramids
        (
            'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
            'inline_deit_t',
            {'neck.type': 'SimpleFeaturePyramid', 'backbone.out_type': 'featmap'},
        ),
        # dilated, without a pyramid
        (
            'mmseg::pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py',
            'ravlt_t',
            {'backbone.out_indices': (2, 3), 'decode_head.in_channels': 512, 'auxiliary_head.in_index': 0},
        ),
        (
            'mmseg::deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024.py',
            'flatten_pvt_v2_b0',
            {'decode_head.c1_in_channels': 32, 'decode_head.in_index': 2, 'backbone.out_indices': (0, 2, 3)},
        ),
        # the neck made a pyramid of plain maps
        (
            'mmseg::vit/vit_deit-s16_mln_upernet_8xb2-160k_ade20k-512x512.py',
            'ravlt_t',
            {'neck': None, 'decode_head.in_channels': [64, 128, 256, 512], 'auxiliary_head.in_channels': 512},
        ),
        # masks by queries
        (
            'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
            'ravlt_t',
            {'decode_head.in_channels': [64, 128, 256, 512], 'decode_head.strides': [4, 8, 16, 32]},
        ),
        # heads that read tokens
        (
            'mmpretrain::vision_transformer/vit-base-p16_32xb128-mae_in1k.py',
            'ravlt_t',
            {'neck.type': 'GlobalAveragePooling', 'head.in_channels': 512},
        ),
        (
            'mmpretrain::deit/deit-tiny_4xb256_in1k.py',
            'inline_deit_t',
            {'neck': None, 'backbone.out_type': 'cls_token'},
        ),
        # grey pictures, and a backbone that holds the classifier
        (
            'mmpretrain::lenet/lenet5_mnist.py',
            'flatten_pvt_v2_b0',
            {'backbone.in_channels': 1, 'backbone.init_cfg': None, 'head.in_channels': 256, 'head.num_classes': 10},
        ),
        # people to tell apart, in pictures of one size
        (
            'mmdet::reid/reid_r50_8xb32-6e_mot17train80_test-mot17val20.py',
            'flatten_pvt_v2_b0',
            {'head.in_channels': 256},
        ),
        # without labels
        ('mmpretrain::mocov2/mocov2_resnet50_8xb32-coslr-200e_in1k.py', 'ravlt_t', {'neck.in_channels': 512}),
        (
            'mmpretrain::mocov3/mocov3_vit-small-p16_16xb256-amp-coslr-300e_in1k.py',
            'flatten_pvt_v2_b0',
            {'neck.in_channels': 256, 'neck.with_avg_pool': True},
        ),
    ],
)
def test_families(swap, upstream, backbone, expected):
    _, cfg = swap(upstream, backbone)
    for key, value in expected.items():
        found = cfg.model
        for part in key.split('.'):
            found = found.get(part)
        assert found == value, key
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault('data_preprocessor', cfg.get('data_preprocessor'))
    with torch.device('meta'):
        MODELS.build(cfg.model)  # as it stands in the file, with the weights that it names


@pytest.mark.slow
def test_upstreams_optimizer_may_stay(swap, tmp_path):
    with mock.patch('mmlinattn.swapping.swap.try_model', wraps=None) as trial:
        trial.return_value = mock.Mock(read=(True,) * 4, without_gradient=(), stops='', loss=0.0)
        _, cfg = swap('mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py', 'ravlt_t', keep_optimizer=True)
        assert cfg.optim_wrapper.optimizer.lr == 0.004
        _, cfg = swap('mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py', 'ravlt_t')
    assert cfg.optim_wrapper.optimizer.lr == 1e-4
    # a schedule that ends at a rate of its own ends in proportion
    (cosine,) = (each for each in cfg.param_scheduler if each.type == 'CosineAnnealingLR')
    assert cosine.eta_min == pytest.approx(0.0002 * 1e-4 / 0.004)
    assert cfg.auto_scale_lr.base_batch_size == 16


def test_what_the_tool_prints(tmp_path, monkeypatch, capsys):
    asked, trial = [], SimpleNamespace(loss=1.23456, stops='')
    made = SimpleNamespace(changes=['a: 1 -> 2', 'b: 3 -> 4'], remarks=['first', 'second'], trial=trial)
    monkeypatch.setattr('mmlinattn.swapping.swap_backbone', lambda *args: asked.append(args) or made)
    main = runpy.run_path(str(ROOT / 'tools' / 'swap_backbone.py'), run_name='tool')['main']
    options = ['mmdet::a/b.py', 'ravlt_t', '--out', 'o.py']
    for more, predicted in (([], ' and predicted'), (['--keep-optimizer'], '')):
        monkeypatch.setattr(sys, 'argv', ['swap_backbone.py', *options, *more])
        main()
        assert capsys.readouterr().out == (
            '  a: 1 -> 2\n  b: 3 -> 4\nnote: first\nnote: second\n'
            f'o.py: trained one step (loss 1.235){predicted}; every parameter of the backbone has a gradient\n'
        )
        trial.stops = 'prediction stops: x'
    assert asked == [('mmdet::a/b.py', 'ravlt_t', 'o.py', keeps) for keeps in (False, True)]
    monkeypatch.setattr('mmlinattn.swapping.swap_backbone', mock.Mock(side_effect=NoPlace('no place\nfor it')))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1 and capsys.readouterr().err == 'error: no place for it\n'
    asked.clear()  # a place that cannot be written costs no trial
    monkeypatch.setattr('mmlinattn.swapping.swap_backbone', lambda *args: asked.append(args))
    monkeypatch.setattr(sys, 'argv', ['swap_backbone.py', *options[:3], str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"error: --out '{tmp_path}' cannot be written: Is a directory.\n" and not asked
    monkeypatch.setattr(sys, 'argv', ['swap_backbone.py'])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith('arguments are required: upstream, backbone, --out\n')


@pytest.mark.slow
def test_tool_says_what_it_changed(tmp_path):
    upstream = tmp_path / 'mine.py'
    upstream.write_text("_base_ = 'mmpretrain::resnet/resnet18_8xb16_cifar10.py'\n")
    out = tmp_path / 'made' / 'swapped.py'
    tool = [sys.executable, str(ROOT / 'tools' / 'swap_backbone.py'), str(upstream), 'ravlt_t', '--out', str(out)]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'backbone: ResNet_CIFAR -> RAVLT tiny' in done.stdout
    assert 'every parameter of the backbone has a gradient' in done.stdout
    assert Config.fromfile(out).model.head.in_channels == 512
