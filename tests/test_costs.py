# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How costs are put together and written down: get_flops, the papers' tables, the page of attentions."""

import contextlib
import runpy
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from config_helpers import ROOT
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmlinattn.analysis import flops
from mmlinattn.analysis.counting import CONV, LINEAR, PRODUCT, Count
from mmlinattn.attention import Grid, HallucinatedMixer

TOOLS = ROOT / 'tools' / 'analysis_tools'
COST = flops.Cost(
    shape=(64, 96),
    params={'neck': 1_500_000, 'head': 250_000},
    macs=Counter(
        {
            ('neck', CONV): 2e9,
            ('neck', PRODUCT): 5e8,
            ('head', LINEAR): 2.5e8,
            ('head', CONV): 1e9,
        }
    ),
    norm_ops=125_000_000,
    peak_bytes=10 * 2**20,
    notes=['one', 'two'],
)
REPORT = """\
image 64 x 96 (height x width), batch 1
part                params M        convolution G             linear G  attention product G                all G
neck                   1.500                2.000                0.000                0.500                2.500
head                   0.250                1.000                0.250                0.000                1.250
total                  1.750                3.000                0.250                0.500                3.750
norms, as fvcore counts them, not in the table: 0.125 G operations
peak activation memory (float32, inference, estimate): 10 MiB
note: one
note: two"""


def test_the_report_of_a_cost():
    assert runpy.run_path(str(TOOLS / 'get_flops.py'), run_name='tool')['report'](COST) == REPORT
    assert COST.total_params == 1_750_000 and COST.layer_macs == 3.25e9
    assert COST.total_macs() == 3.75e9 and COST.total_macs(PRODUCT, LINEAR) == 7.5e8


def test_options_of_the_tool(monkeypatch):
    names = runpy.run_path(str(TOOLS / 'get_flops.py'), run_name='tool')['main'].__globals__
    asked = []
    monkeypatch.setitem(names, 'read_config', lambda path: Config(dict(path=path, a=dict(b=1))))
    monkeypatch.setitem(names, 'count_model', lambda *args: asked.append(args) or COST)
    for args in ([], ['--shape', '64', '96', '--cfg-options', 'a.b=2']):
        monkeypatch.setattr(sys, 'argv', ['get_flops.py', 'mine.py', *args])
        names['main']()
    (first, no_shape), (second, shape) = asked
    assert (first.path, first.a.b, no_shape, second.a.b, shape) == ('mine.py', 1, None, 2, [64, 96])


def test_the_size_that_models_are_counted_at():
    def shape(scope, *pipeline):
        return flops.image_shape(
            Config(dict(default_scope=scope, test_dataloader=dict(dataset=dict(pipeline=pipeline))))
        )

    assert shape('mmdet', dict(scale=(1, 2))) == (800, 1280) and shape('mmseg') == (512, 2048)
    assert shape('mmpretrain', dict(scale=256), dict(crop_size=288), dict(type='Pack')) == (288, 288)
    assert shape('mmpretrain', dict(crop_size=256), dict(scale=(96, 128))) == (96, 128)
    assert shape('mmpretrain', dict(crop_size=224, scale=(0.08, 1.0))) == (224, 224)  # a crop of that part
    assert shape('mmpretrain', dict(type='Pack')) == flops.image_shape(Config(dict())) == (224, 224)
    assert flops.image_shape(Config(dict(default_scope='mmpretrain'))) == (224, 224)


@pytest.mark.parametrize(
    ('name', 'part'),
    [
        ('backbone.stages.0.5.attn', 'backbone.stage1'),
        ('backbone.patch_embeds.3', 'backbone.stage4'),
        ('backbone.position_tables.2', 'backbone.stage3'),
        ('backbone.out_norms.1', 'backbone.stage2'),
        ('backbone.layer3.0', 'backbone.stage3'),
        ('backbone.stem.0', 'backbone'),
        ('roi_head.mask_head.0.convs', 'roi_head.mask_head'),
        ('auxiliary_head.convs', 'auxiliary_head'),
        ('', 'model'),
    ],
)
def test_parts_of_models(name, part):
    assert flops.part_of(name) == part


class Roi(nn.Module):
    """A head that keeps the size of what it was given."""

    def __init__(self, width, size):
        super().__init__()
        self.width, self.sizes = nn.Linear(width, 1), []
        self.extractor = SimpleNamespace(roi_layers=[SimpleNamespace(output_size=size)], out_channels=width)

    def forward(self, x):
        self.sizes.append(tuple(x.shape))


class Modules(nn.ModuleList):
    pass


def test_heads_of_two_stages():
    """Each stage of a cascade; masks on a hundred regions, with their own features or those of the boxes."""
    boxes, masks = Modules([Roi(4, (7, 5)), Roi(6, (3, 3))]), Roi(8, (14, 14))
    extractors = nn.ModuleList()
    extractors.__class__ = type(
        'Extractors', (nn.ModuleList,), {'__iter__': lambda self: iter(h.extractor for h in boxes)}
    )
    ran = []
    model = SimpleNamespace(
        extract_feat=lambda image: (image, image * 2),
        rpn_head=ran.append,
        test_cfg=SimpleNamespace(rpn=SimpleNamespace(max_per_img=300)),
        roi_head=SimpleNamespace(
            bbox_head=boxes,
            bbox_roi_extractor=extractors,
            with_mask=True,
            mask_head=masks,
            mask_roi_extractor=masks.extractor,
        ),
    )
    notes = flops.run_two_stage(model, torch.zeros(1, 3, 8, 8))
    assert [head.sizes for head in boxes] == [[(300, 4, 7, 5)], [(300, 6, 3, 3)]] and masks.sizes == [(100, 8, 14, 14)]
    assert len(ran) == 1 and len(ran[0]) == 2
    assert notes == ['RoI heads: 300 proposals for boxes (test_cfg.rpn.max_per_img), 100 for masks, each stage']
    model.roi_head.mask_roi_extractor, model.roi_head.bbox_roi_extractor = None, boxes[1].extractor
    flops.run_two_stage(model, torch.zeros(1, 3, 8, 8))
    assert masks.sizes[1] == (100, 6, 3, 3) and boxes[0].sizes[1] == boxes[1].sizes[1] == (300, 6, 3, 3)
    model.roi_head.with_mask = False
    flops.run_two_stage(model, torch.zeros(1, 3, 8, 8))
    assert len(masks.sizes) == 2 and len(boxes[0].sizes) == 3


class Segmentor(nn.Module):
    def __init__(self, data_preprocessor=None, auxiliary=True):
        super().__init__()
        self.backbone, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4)
        self.auxiliary_head = nn.Linear(4, 4) if auxiliary else None
        self.given = data_preprocessor

    def forward(self, image, mode):
        assert mode == 'tensor' and not torch.is_grad_enabled() and not self.training and image.is_meta
        return self.norm(self.backbone(image))


@pytest.mark.parametrize('auxiliary', [True, False])
def test_a_model_is_counted_without_memory(monkeypatch, auxiliary):
    monkeypatch.setitem(MODELS._module_dict, 'CountedToy', Segmentor)
    cfg = Config(dict(model=dict(type='CountedToy', auxiliary=auxiliary), data_preprocessor=dict(a=1)))
    model = flops.build_model(cfg)
    assert 'data_preprocessor' not in cfg.model  # the config stays as it is
    assert model.given == dict(a=1) and model.backbone.weight.is_meta and type(model.norm) is not nn.SyncBatchNorm
    cost = flops.count_model(cfg, (32, 40))
    pixels = 32 * 40
    assert cost.shape == (32, 40) and cost.macs == {('backbone', CONV): pixels * 3 * 4 * 9}
    assert cost.norm_ops == 2 * 4 * pixels and cost.peak_bytes >= 2 * 4 * 4 * pixels
    assert cost.params == dict(backbone=112, norm=8, **(dict(auxiliary_head=20) if auxiliary else {}))
    notes = ['one multiply-add is one operation; norms, activations, pooling and resizing are not counted']
    cfg.model.data_preprocessor = dict(a=2)  # a model's own comes first
    assert flops.build_model(cfg).given == dict(a=2) and 'data_preprocessor' in cfg.model
    assert DefaultScope.get_current_instance().scope_name == 'mmengine'
    assert cost.notes == notes + ['the auxiliary head has parameters but does not run at test time'] * auxiliary
    assert flops.count_model(cfg).shape == (224, 224)
    for shape in ((31, 64), (64, 31)):
        with pytest.raises(
            flops.RunError, match=f'shape {shape[0]} {shape[1]}: height and width have to be at least 32.'
        ):
            flops.count_model(cfg, shape)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.GroupNorm(5, 5), nn.BatchNorm1d(5).eval())

    def forward(self, x, stranger):
        return stranger(self.layers(x)) @ torch.zeros(4, 3, device=x.device)


def test_whose_operations_they_are():
    """Inner modules by their names; those of strangers, and plain products, are of who calls them."""
    with torch.device('meta'):
        model, stranger, x = nn.Sequential(Nested()), nn.Linear(4, 4, bias=False), torch.zeros(2, 5, 6)
    with torch.no_grad(), Count(model) as count:
        model[0](x, stranger)
    assert count.macs == {('0.layers.1', LINEAR): 10 * 6 * 4, ('0', LINEAR): 10 * 4 * 4 + 10 * 4 * 3}
    assert count.norm_ops == 5 * 60 + 5 * 40 + 2 * 40
    call = nn.Module.__call__
    with pytest.raises(KeyError), Count(model):
        raise KeyError
    assert nn.Module.__call__ is call  # put back
    with torch.no_grad(), Count(model) as again:
        model[0](x, stranger)
    assert again.macs == count.macs  # anew


@pytest.mark.parametrize(
    ('steps', 'taps'), [((), 0), (('ihh',), 9 * 3), (('chh',), 3 * 3), (('chh', 'ihh'), 9 * 3 + 3 * 3)]
)
def test_hallucinated_attention_counts_the_steps_that_it_has(steps, taps):
    """A 3x3 for each of three maps, and their mixture to three others."""
    with torch.device('meta'):
        mixer = HallucinatedMixer(24, 3, steps=steps)
        q, k, v = torch.zeros(1, 30, 12), torch.zeros(1, 20, 12), torch.zeros(1, 20, 24)
    with torch.no_grad(), Count(mixer) as count:
        mixer(q, k, v, Grid(5, 6), Grid(4, 5))
    assert count.macs[('', PRODUCT)] == 30 * 20 * (12 + 24 + taps)


def test_fused_attention_with_wider_values():
    q, v = torch.zeros(2, 1, 7, 4, device='meta'), torch.zeros(2, 1, 9, 6, device='meta')
    with Count(nn.Identity()) as count:
        assert F.scaled_dot_product_attention(q, v[..., :4], v).shape == (2, 1, 7, 6)
    assert count.macs == {('', PRODUCT): 2 * 7 * 9 * (4 + 6)}


def test_memory_that_is_used_again_counts_again():
    """Each map with the one before it, which is freed when the next one is there."""
    with Count(nn.Identity()) as count:
        for length in range(1, 8):
            x = torch.zeros(1000 * length, device='meta')
    assert count.peak_bytes == 4 * (6000 + 7000) and len(x) == 7000


def test_memory_is_there_as_long_as_a_view_of_it():
    """A slice keeps all of the map that it is of, also where it does not hold that map itself."""
    with torch.inference_mode(), Count(nn.Identity()) as count:
        kept = torch.zeros(1000, device='meta')[:1]
        other = torch.zeros(500, device='meta')
    assert count.peak_bytes == 4 * (1000 + 500) and (len(kept), len(other)) == (1, 500)


def test_buffers_are_no_activations():
    model = nn.BatchNorm1d(50, affine=False, device='meta').eval()
    with Count(model) as count:
        kept = model.running_mean.view(5, 10).mT
    assert count.peak_bytes == 0 and kept.shape == (10, 5)


def test_a_layer_that_fails_is_left_again():
    """What is tried and given up does not take what comes after."""

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrong, self.right = nn.Linear(5, 4), nn.Linear(3, 4)

        def forward(self, x):
            with contextlib.suppress(RuntimeError):
                self.wrong(x)
            return torch.addmm(torch.zeros(4), x, torch.zeros(3, 4)) + self.right(x)

    model = Tries()
    with torch.no_grad(), Count(model) as count:
        model(torch.zeros(2, 3))
    assert count.macs == {('', LINEAR): 2 * 3 * 4, ('right', LINEAR): 2 * 3 * 4}


@pytest.mark.parametrize('error', [NotImplementedError, RuntimeError])
def test_a_model_that_cannot_be_counted_says_why(monkeypatch, error):
    class Fails(nn.Module):
        def forward(self, image, mode):
            raise error('because')

    monkeypatch.setattr(flops, 'build_model', lambda cfg: Fails())
    with pytest.raises(flops.RunError, match='Fails cannot be counted without running it: because'):
        flops.count_model(Config(dict()))


def test_weights_are_no_activations():
    model = nn.Linear(100, 50, device='meta')
    with Count(model) as count:
        kept = [model.weight.mT + 0, model.weight.mT]
        del kept[0]
        kept = model.weight[:1] * 2
    assert count.peak_bytes == 4 * 100 * 50 and kept.shape == (1, 100)
