# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Exportable part of a model, sizes of graphs and their tolerance, tested on toy models."""

import json
import types
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

import mmlinattn
from mmlinattn.tooling.export import FORMATS, ExportableModel, Sizes, export_model, formats, models
from mmlinattn.utils import private_apis
from mmlinattn.utils.errors import RunError

INF = float('inf')


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        (dict(mean=(1.0, 2.0, 3.0), std=(4.0, 5.0, 6.0)), dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])),
        (dict(bgr_to_rgb=True, pad_size_divisor=32), dict(channel_order='RGB', pad_size_divisor=32)),
        (dict(to_rgb=True), dict(channel_order='RGB')),
        (dict(rgb_to_bgr=True, mean=[9.0]), dict(channel_order='RGB', mean=[9.0] * 3)),
        (dict(std=2.0, pad_val=7), dict(std=[2.0] * 3, pad_value=7)),
        # a segmentor's test-time padding; its own size_divisor is for training
        (dict(size_divisor=512, test_cfg=dict(size_divisor=32)), dict(pad_size_divisor=32)),
        ({}, {}),
    ],
)
def test_metadata(given, said):
    cfg = Config(dict(model=dict(data_preprocessor=given)))
    meta = dict(dataset_meta=dict(classes=('a', 'b')))
    found = models.metadata(cfg, 'detector', Sizes(1, 64, 80), meta, ['feat0', 'feat1'])
    unsaid = dict(channel_order='BGR', mean=[0.0] * 3, std=[1.0] * 3, pad_size_divisor=1, pad_value=0)
    unsaid.update(mmlinattn=mmlinattn.__version__, task='detector', serves='image (1, 3, 64, 80), no other size')
    unsaid.update(outputs=['feat0', 'feat1'], input_range=[0, 255], classes=['a', 'b'])
    assert json.loads(json.dumps(found)) == {**unsaid, **dict.fromkeys(('windows', 'resize', 'crop')), **said}


def test_a_test_pipeline_that_normalises():
    step = dict(type='Normalize', mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])

    def said(*steps, **given):
        pipeline = [dict(type='LoadImageFromFile'), *steps, dict(type='PackInputs')]
        data = dict(test_dataloader=dict(dataset=dict(pipeline=pipeline)))
        cfg = Config(dict(data, model=dict(data_preprocessor=given)))
        meta = models.metadata(cfg, 'classifier', Sizes(1, 64, 80), None, ['logits'])
        return [meta[key] for key in ('mean', 'std', 'channel_order')]

    neutral = dict(mean=[0, 0, 0], std=[1, 1, 1], to_rgb=False)
    assert said(step, **neutral) == said(step) == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 'RGB']
    assert said(dict(step, to_rgb=False))[2] == 'BGR'
    other = dict(step, type='torchvision/Normalize')
    for steps, given in (([step], dict(to_rgb=True)), ([step, step], {}), ([other], {}), ([step], dict(mean=7, std=2))):
        with pytest.raises(
            RunError, match=f'mean={given.get("mean")}: the file cannot say how to normalise. Write mean'
        ):
            said(*steps, **given)


def test_windows_of_segmentors():
    windows = dict(crop_size=[64, 80], stride=[32, 40])
    for test_cfg, said in ((dict(windows, mode='slide'), windows), (dict(mode='whole'), None)):
        cfg = Config(dict(model=dict(test_cfg=test_cfg)))
        assert models.metadata(cfg, 'segmentor', Sizes(1, 64, 80), None, ['logits'])['windows'] == said


def test_decision_rules_of_heads():
    heads = pytest.importorskip('mmpretrain.models.heads')
    several = partial(heads.MultiLabelLinearClsHead, num_classes=3, in_channels=4)
    for head, expected in (
        (SimpleNamespace(out_channels=1, num_classes=2, threshold=0.3), ('sigmoid', 0.3)),
        (SimpleNamespace(out_channels=2, threshold=None), ('softmax', None)),
        (several(thr=0.6), ('sigmoid', 0.6)),
        (several(topk=2), ('sigmoid', None, 2)),
        (heads.LinearClsHead(num_classes=3, in_channels=4), ('softmax', None)),
    ):
        assert models.decision(head) == dict(zip(('activation', 'threshold', 'topk'), expected))


class Backbone(nn.Module):
    deployed = 0

    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.pool = nn.Conv2d(3, 2, 4, 4), nn.Dropout(0.9), nn.AdaptiveAvgPool2d(2)

    def switch_to_deploy(self):
        self.deployed += 1

    def forward(self, x):
        return self.drop(self.conv(x))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.neck = Backbone(), nn.Conv2d(2, 2, 1)
        self.branches = nn.ModuleList([nn.AdaptiveAvgPool2d((2, 3))])

    def train(self, mode=True):  # as of MMDetection's students: gives nothing back
        super().train(mode)

    def extract_feat(self, x):
        x = self.neck(self.backbone(x))
        return x, F.max_pool2d(x, 1, stride=2)

    def forward(self, x, mode):
        assert mode == 'tensor'
        return self.neck(self.backbone(x))


class Segmentor(Toy):
    def __init__(self, align_corners=False):
        super().__init__()
        self.align_corners, self.decode_head = align_corners, types.SimpleNamespace()  # of a cascade, a list

    def encode_decode(self):
        pass


class Classifier(Toy):
    with_head = True

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x, mode):
        return super().forward(x, mode).mean((2, 3))


def test_models_are_recognised_and_prepared():
    for model, task in ((Toy(), 'detector'), (Segmentor(), 'segmentor'), (Classifier(), 'classifier')):
        model.train()
        found = ExportableModel(model)
        assert found.task == task
        found.fold()
        assert not model.training and model.backbone.deployed == 1
        assert not any(p.requires_grad for p in model.parameters())
        outputs = found(torch.randn(2, 3, 36, 64))
        names = dict(detector=['feat0', 'feat1'], segmentor=['labels'], classifier=['scores'])[task]
        assert found.output_names(outputs) == names and (task != 'detector' or outputs[1].shape == (2, 2, 5, 8))
        for pool in (model.backbone.pool, model.branches[0]):  # of heads too
            assert type(pool).__name__ == 'BinMeans'
    headless = Classifier()
    headless.with_head = False
    assert ExportableModel(headless).task == 'detector'
    with pytest.raises(RunError, match='^Sequential is no classifier, segmentor or detector with a backbone.$'):
        ExportableModel(nn.Sequential())


@pytest.mark.parametrize('align_corners', [False, True])
def test_segmentors_give_label_maps_of_the_images_size(align_corners):
    """Return logits too for models that are tested in windows, so that applications can average them."""
    model, image = Segmentor(align_corners), torch.randn(2, 3, 33, 50)
    model.eval()
    logits = F.interpolate(model(image, 'tensor'), (33, 50), mode='bilinear', align_corners=align_corners)
    assert torch.equal(ExportableModel(model)(image), logits.argmax(1))
    model.test_cfg = dict(mode='slide')
    windowed = ExportableModel(model)
    assert windowed.output_names(windowed(image)) == ['labels', 'logits']
    assert all(map(torch.equal, windowed(image), (logits.argmax(1), logits)))


def test_segmentors_of_one_output_channel_decide_by_a_threshold():
    model = Segmentor()
    model.eval()
    model.neck, model.decode_head.threshold = nn.Conv2d(2, 1, 1), 0.3
    image = torch.randn(2, 3, 33, 50)
    logits = F.interpolate(model(image, 'tensor'), (33, 50), mode='bilinear')[:, 0]
    assert torch.equal(ExportableModel(model)(image), (logits.sigmoid() > 0.3).long())


def test_classifiers_give_probabilities():
    model, image = Classifier(), torch.randn(2, 3, 33, 50)
    model.eval()
    logits = model(image, 'tensor')
    torch.testing.assert_close(ExportableModel(model)(image), logits.softmax(1))
    model.head = type('MultiLabelHead', (nn.Identity,), dict(thr=0.5))()
    torch.testing.assert_close(ExportableModel(model)(image), logits.sigmoid())


def test_heads_of_several_results(fake):
    """Predict by the first result of DAHead and EncHead, also in a cascade; others are unsupported."""
    model, image = Segmentor(), torch.randn(2, 3, 33, 50)
    model.decode_head = nn.ModuleList([nn.Identity(), type('DAHead', (nn.Module,), {})()])
    expected = ExportableModel(model)(image)
    forward = model.forward
    model.forward = lambda x, mode: (forward(x, mode), x, x)
    assert torch.equal(ExportableModel(model)(image), expected)
    model.decode_head = nn.Identity()
    with pytest.raises(RunError, match='^Identity gives a tuple; a graph needs a head with one tensor of logits.$'):
        fake.export(model, Sizes(1, 64, 64))


class Fake(formats.Format):
    """Format that returns the model in place of the file, and records the arguments of ``write``."""

    smallest_of_pyramids = 65

    def write(self, model, example, path, smallest, metadata):
        self.model, self.shape, self.smallest, self.metadata = model, tuple(example.shape), smallest, metadata
        for file in (path, path.with_suffix('.bin')):
            file.write_text('new')

    def load(self, path, score_thr=None):
        assert path.read_text() == 'new'
        return self.model


@pytest.fixture
def fake(tmp_path, monkeypatch):
    form = Fake()
    monkeypatch.setitem(FORMATS, 'fake', form)
    cfg, target = Config(dict(model={})), tmp_path / 'graph.x'
    form.target = target
    form.export = lambda model, sizes: export_model(model, cfg, target, 'fake', sizes)
    return form


def test_files_are_written_with_their_deviations(fake, tmp_path):
    (tmp_path / 'graph.x').write_text('older')
    found = fake.export(Toy(), Sizes(2, 64, 80))
    assert (fake.shape, fake.smallest) == ((2, 3, 64, 80), None)
    assert found.files == sorted(tmp_path.iterdir()) == [tmp_path / 'graph.bin', tmp_path / 'graph.x']
    assert (tmp_path / 'graph.x').read_text() == 'new' and found.metadata == fake.metadata
    assert found.errors == {(2, 3, 64, 80): 0.0}
    assert found.metadata['outputs'] == ['feat0', 'feat1'] and found.metadata['task'] == 'detector'


def test_folding_that_changes_the_numbers_is_found(fake):
    model = Toy()
    model.backbone.switch_to_deploy = lambda: model.backbone.conv.weight.data.mul_(2)
    with pytest.raises(RunError, match='deviates from the model'):
        fake.export(model, Sizes(1, 64, 64))
    model.backbone.switch_to_deploy = mock.Mock(side_effect=ValueError)
    assert fake.export(model, Sizes(1, 64, 64)).errors == {(1, 3, 64, 64): 0.0}


def test_sizes_and_parts_that_are_exported(fake):
    """Accept sizes from 32 for classifiers, and from the format's smallest for other models."""
    for model, smallest in ((Toy(), 65), (Segmentor(), 65), (Classifier(), 32)):
        found = fake.export(model, Sizes(1, 96, 96, dynamic=True))
        assert fake.smallest == smallest and f'height and width >= {smallest}' in found.metadata['serves']
        assert len(found.errors) == 3
    fake.export(Toy(), Sizes(1, 32, 32))
    assert fake.smallest is None  # of a fixed size it is no matter
    for sizes, least in ((Sizes(1, 64, 96, True), 65), (Sizes(1, 96, 31), 32)):
        said = f'^--shape {sizes.height} {sizes.width}: expected at least {least} pixels per side.$'
        with pytest.raises(RunError, match=said):
            fake.export(Toy(), sizes)
    with pytest.raises(RunError, match='^--neck is for detectors; the config builds a classifier.$'):
        export_model(Classifier(), Config(dict(model={})), fake.target, 'fake', Sizes(1, 64, 64), neck=True)


@pytest.mark.parametrize('place', ['write', 'load'])
def test_models_that_a_format_cannot_express(fake, tmp_path, monkeypatch, place):
    monkeypatch.setattr(Fake, place, mock.Mock(side_effect=ValueError('no\n  such operator')))
    with pytest.raises(RunError, match='^fake cannot express this model: ValueError: no such operator$'):
        fake.export(Toy(), Sizes(1, 64, 64))
    assert not list(tmp_path.iterdir())


def test_deviation_is_that_of_the_worst_output_in_its_standard_deviations():
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    off = torch.tensor([0.0, 0.0, 0.0, 1.0])
    for outs, expected in (([x + off, y + off], [x, y]), ([y + off, x - off], [y, x])):
        assert models.deviation(outs, expected) == pytest.approx(1 / x.std().item())
    for outs in ([x[:2]], [x * float('nan')], [x * INF]):
        assert models.deviation(outs, [x]) == models.deviation([x, *outs], [x, x]) == INF
    assert models.deviation([x], [x, x]) == INF
    for value in (0.0, -4.0):  # constant outputs, such as one logit of one image, in units of their size
        alike = torch.full((1, 1), value)
        assert models.deviation(alike, alike) == 0
        assert models.deviation(alike + 0.5, alike) == pytest.approx(0.5 / (abs(value) or 1))
    labels = torch.arange(100)  # by the share that differs
    assert models.deviation(labels.where(labels > 2, 7), labels) == pytest.approx(0.03)


def test_deviating_graphs_are_not_written(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(models, 'deviation', lambda *_: 1e-3)
    assert fake.export(Toy(), Sizes(1, 64, 64)).errors == {(1, 3, 64, 64): 1e-3}
    monkeypatch.setattr(models, 'deviation', lambda *_: 1.1e-3)
    with pytest.raises(RunError, match=r'^the fake graph deviates .* \(1x3x64x64: 1.1e-03\); .*was not written'):
        fake.export(Toy(), Sizes(1, 64, 64))


class Pyramid(nn.Module):
    """FPN with extra levels pooled from the last one."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 32, 32)
        self.neck = MODELS.build(dict(type='mmdet.FPN', in_channels=[4], out_channels=4, num_outs=3))

    def extract_feat(self, x):
        return self.neck([self.backbone(x)])


@pytest.mark.skipif(not private_apis.CAN_BE_SIZE_OBLIVIOUS, reason='since torch 2.6')
def test_a_graph_of_a_detector_serves_odd_last_levels(tmp_path):
    pytest.importorskip('mmdet.models')
    sizes = Sizes(1, 96, 160, dynamic=True)
    export = export_model(Pyramid(), Config(dict(model=dict())), tmp_path / 'graph.pt2', 'torch-export', sizes)
    assert list(export.errors) == [(1, 3, 96, 160), (1, 3, 133, 178), (2, 3, 66, 101)]
    graph = FORMATS['torch-export'].load(tmp_path / 'graph.pt2')
    assert [out.shape[2:] for out in graph(torch.randn(1, 3, 96, 170))] == [(3, 5), (2, 3), (1, 2)]
