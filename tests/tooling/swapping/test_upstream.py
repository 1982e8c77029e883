# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Upstream configs: backbone, images, feature maps, smoke tests, and unsupported ones."""

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.tooling.swapping import NoModel, Unsupported, smoke, swap_backbone
from mmlinattn.tooling.swapping.measuring import measure, run_necks
from mmlinattn.tooling.swapping.upstream import Upstream, join_encoder, split_encoder
from mmlinattn.tooling.swapping.zoo import FeatureMap
from mmlinattn.utils.errors import RunError

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


DETECTOR = "default_scope = 'mmdet'\nmodel = dict(type='M', "
DINO = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'


@pytest.mark.parametrize(
    ('upstream', 'kind', 'reason'),
    [
        ("default_scope = 'mmpose'\nmodel = dict()", RunError, "default_scope='mmpose': expected one of ('mmdet', "),
        ("default_scope = 'mmdet'\n", NoModel, 'has no model: it is a part that other configs inherit'),
        ("default_scope = 'mmdet'\nmodel = 1 / 0", RunError, 'cannot be read: ZeroDivisionError: division by zero'),
        (f"{DETECTOR}backbone=dict(arch='x'))", Unsupported, 'M has no backbone of its own to build'),
        (f'{DETECTOR}image_encoder=1, head=3)', Unsupported, 'M has no backbone of its own to build'),
        (f'{DETECTOR}detector=1)', Unsupported, 'M has no backbone of its own to build'),
        ('mmdet::dino/dino-4scale_r50_8xb2-12e.py', RunError, f'no such config. Did you mean {DINO!r}?'),
        ('mmpose::dino/x.py', RunError, "UPSTREAM 'mmpose::dino/x.py': expected one of ('mmlinattn', 'mmdet', 'mmse"),
        ('mmdet::cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco.py', Unsupported, 'equal maps of one stride'),
        ('mmpretrain::mae/mae_vit-base-p16_8xb512-amp-coslr-300e_in1k.py', Unsupported, 'masked image modelling'),
        ('mmpretrain::dinov2/vit-small-p14_dinov2-pre_headless.py', Unsupported, 'it has no head'),
        ('mmseg::dpt/dpt_vit-b16_8xb2-160k_ade20k-512x512.py', Unsupported, 'a class token beside each map'),
    ],
)
def test_refused_configs_and_networks_have_one_line(tmp_path, upstream, kind, reason):
    if '\n' in upstream:  # the text of a file
        (tmp_path / 'mine.py').write_text(upstream)
        upstream = str(tmp_path / 'mine.py')
    with pytest.raises(kind) as error:
        swap_backbone(upstream, 'ravlt_t', 'never_written.py')
    assert reason in str(error.value) and '\n' not in str(error.value)


def upstream_of(backbone, task='mmseg', **cfg):
    model = dict(type='M', backbone=backbone, **cfg.pop('network', {}))
    return Upstream('base.py', Config(dict(model=model, **cfg)), task)


@pytest.mark.parametrize(
    ('task', 'transform', 'size'),
    [
        ('mmdet', dict(type='Resize', scale=(300, 200), keep_ratio=False), (200, 300)),
        ('mmdet', dict(type='Resize', scale=(1333, 800), keep_ratio=True), None),
        ('mmpretrain', dict(type='CenterCrop', crop_size=(28, 40)), (40, 32)),
        ('mmpretrain', dict(type='CenterCrop', crop_size=(40, 28)), (32, 40)),
        ('mmpretrain', dict(type='Flip'), None),
    ],
)
def test_sizes_of_images(task, transform, size):
    loader = dict(dataset=dict(pipeline=[dict(type='Load'), transform]))
    source = upstream_of(dict(type='B'), task, test_dataloader=loader)
    assert source.image_size == size and source.sizes[0] == (size or ((320, 320) if task == 'mmdet' else (256, 256)))
    for fixed in ((512, 1024), (320, 321)):
        source = upstream_of(dict(type='B'), network=dict(data_preprocessor=dict(size=fixed)))
        assert source.sizes == [(256, 256), fixed]


def test_masks_and_channels_of_images():
    loading = dict(pipeline=[dict(type='LoadAnnotations', with_mask=True)])
    source = upstream_of(dict(type='B', in_channels=1), 'mmdet', train_dataloader=loading)
    assert source.has_masks and source.image_channels == 1
    source = upstream_of(dict(type='B'), data_preprocessor=dict(mean=[0.5]))
    assert not source.has_masks and source.image_channels == 1


def test_encoders_of_retrievers():
    network = dict(type='ImageToImageRetriever', image_encoder=[dict(type='B'), dict(type='N')], head=1)
    parts = split_encoder(network)
    assert (parts['backbone'], parts['neck'], parts['head']) == (dict(type='B'), [dict(type='N')], 1)
    assert join_encoder(parts) == network and join_encoder(dict(type='M', backbone=1)) == dict(type='M', backbone=1)


@MODELS.register_module()
class Measurable(nn.Module):
    """Backbone with feature maps of (channels, stride); inference returns only the one at index ``alone``."""

    def __init__(self, maps=(), alone=None, fails=False, img_size=None):
        super().__init__()
        self.maps, self.alone, self.fails = maps, alone, fails

    def forward(self, x):
        if self.fails:
            raise LookupError('of two\nlines')
        outs = [x.new_zeros(len(x), dim, *(side // stride for side in x.shape[2:])) for dim, stride in self.maps]
        return tuple(outs) if self.training or self.alone is None else outs[self.alone]


def test_maps_are_measured():
    assert measure(upstream_of(dict(type='Measurable', maps=[(3, 4), (5, 32)]))).maps == [(3, 4), (5, 32)]
    found = measure(upstream_of(dict(type='Measurable', maps=[(3, 8), (5, 8)], alone=1)))
    assert found.alone == 1 and found.maps == [FeatureMap(3, 8), FeatureMap(5, 8)]
    assert measure(upstream_of(dict(type='Measurable', maps=[(3, 4)], img_size=96))).size == (96, 96)
    images = dict(dataset=dict(pipeline=[dict(type='Resize', scale=64)]))
    classifier = upstream_of(dict(type='Measurable', maps=[(3, 4)]), 'mmpretrain', test_dataloader=images)
    assert measure(classifier).size == (64, 64)


def test_backbones_without_maps():
    with pytest.raises(Unsupported, match='returns no maps or tokens$'):
        measure(upstream_of(dict(type='Measurable')))
    with pytest.raises(RunError, match='its own backbone does not run here: LookupError: of two lines$'):
        measure(upstream_of(dict(type='Measurable', fails=True)))
    with pytest.raises(RunError, match='its own backbone does not run here: TypeError'):
        measure(upstream_of(dict(type='Measurable', other=1)))


@MODELS.register_module()
class Timed(BaseModel):
    """Network that skips the first feature map, and changes its loss by epochs (as TOOD) and iterations (as
    BoxInst)."""

    given: dict

    def __init__(self, backbone, data_preprocessor=None, predicts=True, shares=False, **given):
        Timed.given = dict(given, data_preprocessor=data_preprocessor)
        super().__init__()
        self.predicts, self.backbone = predicts, nn.Module()
        self.backbone.norms = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.neck = self.backbone.norms[1] if shares else None
        self.backbone.forward = lambda x: [norm(x) for norm in self.backbone.norms]

    def forward(self, inputs, mode):
        if mode == 'predict':
            return [] if self.predicts else inputs[7]
        times = [MessageHub.get_current_instance().get_info(name) / 10 for name in ('epoch', 'iter')]
        return dict(loss=sum(out.sum() for out in self.backbone(inputs)[1:]) + sum(times))


def test_smoke_tests():
    source, batch, network = upstream_of(dict(type='B')), dict(inputs=torch.ones(1, 2)), dict(type='Timed', backbone=1)
    result = smoke.smoke_test(network, source, (32, 32), batches=(batch, batch))
    assert result.without_gradient == ('norms.0.weight', 'norms.0.bias') and not result.failure
    result = smoke.smoke_test(dict(network, predicts=False), source, (32, 32), batches=(batch, batch))
    assert result.loss is not None
    assert result.failure.startswith('prediction stops: IndexError: index 7 is out of bounds')
    result = smoke.smoke_test(network, source, (32, 32), batches=(dict(inputs='x'), batch))
    assert result.failure.startswith('training stops: TypeError') and result.loss is None
    for loss in ('inf', 'nan'):
        MessageHub.get_current_instance().update_info('epoch', float(loss))
        result = smoke.smoke_test(network, source, (32, 32), batches=(batch, batch))
        assert result.failure == f'training stops: ValueError: the loss of the first step is {loss}'
    MessageHub.get_current_instance().update_info('epoch', 0)
    assert smoke.smoke_test(dict(type='NoSuch'), source, (32, 32)).failure.startswith('it cannot be built: KeyError')
    keys = {'cls_token': dict(decay_mult=0.0), 'norms.1': dict(lr_mult=0.1)}
    for paramwise in (dict(bias_decay_mult=0.0), None, dict(custom_keys=keys)):
        wrapper = dict(optimizer=dict(type='SGD', lr=0.1, weight_decay=0.1), paramwise_cfg=paramwise)
        assert not smoke.smoke_test(dict(network, shares=True), source, (32, 32), wrapper, (batch, batch)).failure
    assert list(keys) == ['norms.1']


@pytest.mark.parametrize(
    ('given', 'built'),
    [
        (dict(norm_cfg=[dict(type='mmdet.MMSyncBN')]), dict(norm_cfg=[dict(type='SyncBN')])),
        (dict(test_cfg=dict(mode='slide', stride=(4, 4))), dict(test_cfg=dict(mode='whole'))),
        (dict(test_cfg=dict(rpn=dict(max_per_img=1000))), dict(test_cfg=dict(rpn=dict(max_per_img=50)))),
        (dict(sampler=dict(type='S', num=512), x=dict(num=512)), dict(sampler=dict(type='S', num=32), x=dict(num=512))),
        (
            dict(data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 64), batch_augments=[], test_cfg={})),
            dict(data_preprocessor=dict(type='SegDataPreProcessor', size=(32, 32), test_cfg=None)),
        ),
    ],
)
def test_settings_for_one_process_and_dummy_inputs(given, built):
    batch = dict(inputs=torch.ones(1, 2))
    smoke.smoke_test(
        dict(type='Timed', backbone=1, **given), upstream_of(dict(type='B')), (32, 32), None, (batch, batch)
    )
    assert Timed.given == dict(dict(data_preprocessor=None), **built)


def test_maps_behind_necks():
    maps, size = [FeatureMap(8, 4), FeatureMap(16, 8)], (64, 96)
    neck = dict(type='mmdet.FPN', in_channels=[8, 16], out_channels=5, num_outs=3)
    assert run_necks([neck], maps, size) == [(5, 4), (5, 8), (5, 16)] and run_necks([], maps, size) == maps
    pool = dict(type='mmpretrain.GlobalAveragePooling')
    assert run_necks([neck, pool], maps, size) == [(5, None)] * 3
    assert run_necks([dict(neck, in_channels=[8, 17])], maps, size) is None and run_necks([pool], [], size) is None
