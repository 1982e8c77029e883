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

from mmlinattn import backbones
from mmlinattn.analysis import attentions, flops, paper_tables, published
from mmlinattn.analysis.counting import CONV, LINEAR, PRODUCT, Count
from mmlinattn.analysis.published import Row
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


# --- tables -----------------------------------------------------------------------------------------------------------

ROW = Row(
    'mmdet', 'RAVLT-T', 'Mask R-CNN 1x', 'RALA Tab. 2', '33.0', '', '219', {'box AP': 47.3, 'mask AP': 43.0}, None
)


def cost(params, layers, products, norms):
    macs = Counter({('a', CONV): layers * 1e9, ('a', PRODUCT): (products - layers) * 1e9})
    return flops.Cost((1, 1), {'a': int(params * 1e6)}, macs, round((norms - products) * 1e9), 0, [])


def test_lines_of_a_table():
    line = paper_tables.cells(ROW, cost(33.5, 218, 225, 230))
    assert line == [
        *('RAVLT-T', 'Mask R-CNN 1x', '33.0', '33.50', '+0.50', '219', '218.00', '225.00', '230.00'),
        *('layers', '-0.5 %', 'box AP 47.3, mask AP 43'),
    ]
    assert len(line) == len(paper_tables.HEADER)
    assert paper_tables.cells(ROW._replace(flops='226'), cost(32, 218, 225, 230))[4:11:5] == ['-1.00', 'products']
    assert paper_tables.cells(ROW._replace(released_params='33.52'), cost(33.5, 1, 2, 3))[2:5] == [
        '33.52',
        '33.50',
        '-0.02',
    ]
    # of what is published, not of what is counted
    assert paper_tables.cells(ROW._replace(flops='200'), cost(33.5, 150, 1, 2))[10] == '-25.0 %'
    for counted in (102.01, 97.99):
        assert paper_tables.far_rows([(ROW._replace(flops='100'), cost(33.5, counted, 200, 300))])
    for counted in (101.99, 98.01):
        assert not paper_tables.far_rows([(ROW._replace(flops='100'), cost(33.5, counted, 200, 300))])
    bare = paper_tables.cells(ROW._replace(params='', flops=''), cost(33.5, 1, 2, 3))
    assert bare[2:] == ['', '33.50', '', '', '1.00', '2.00', '3.00', '', '', 'box AP 47.3, mask AP 43']
    missing = paper_tables.cells(ROW, None)
    assert missing == ['RAVLT-T', 'Mask R-CNN 1x', '33.0', 'not built', '', '219', *[''] * 5, 'box AP 47.3, mask AP 43']
    # the one that counts least, of equals
    assert paper_tables.nearest_convention(2.0, dict(layers=1.5, products=2.5, norms=2.5)) == 'layers'


def test_conventions_of_papers():
    measured = [
        (ROW, cost(1, 218, 225, 230)),
        (ROW._replace(flops='200'), cost(1, 190, 201, 220)),
        (ROW._replace(flops='100'), cost(1, 99, 120, 130)),
        (ROW._replace(source='InLine Tab. 5', task='mmseg', flops='50'), cost(1, 40, 45, 60)),
        (ROW._replace(flops=''), cost(1, 1, 1, 1)),
        (ROW, None),
    ]
    assert paper_tables.which_convention(measured).splitlines() == [
        '| paper | task | rows | nearest, rows | layers, median | products, median | norms, median |',
        '| --- | --- | --- | --- | --- | --- | --- |',
        '| RALA | mmdet | 3 | layers 2, products 1 | -1.0 % | +2.7 % | +10.0 % |',
        '| InLine | mmseg | 1 | products 1 | -20.0 % | -10.0 % | +20.0 % |',
    ]
    # the most frequent first, whatever comes first in the table
    assert '| layers 2, products 1 |' in paper_tables.which_convention([measured[1], measured[0], measured[2]])
    # a median of what is too much and too little, not of sizes
    around = [(ROW._replace(flops='100'), cost(1, counted, 200, 300)) for counted in (95, 102, 101)]
    assert paper_tables.which_convention(around).splitlines()[2].split(' | ')[4] == '+1.0 %'
    far = measured[3][0]
    assert paper_tables.far_rows(measured) == f'`{far.name}` (50 published, 45.0 counted)'
    assert paper_tables.far_rows(measured, 0.4).startswith(
        '`mmdet/ravlt_t_maskrcnn_1x` (219 published, 218.0 counted), '
    )
    text = paper_tables.page(measured)
    assert text.index('## COCO detection, 1280x800') < text.index('## ADE20K segmentation, 512x2048')
    assert 'ImageNet-1K' not in text and f'stays more than 2 % away: `{far.name}` (50' in text
    assert 'stays more than 2 % away: none.' in paper_tables.page(measured[:3])
    for name, meaning in paper_tables.CONVENTIONS.items():
        assert f'- **{name}**: {meaning}' in text


def test_models_are_measured_as_papers_do(monkeypatch, tmp_path):
    """At the resolution of a classifier, else at the task's; hMHSA's merged."""
    monkeypatch.setattr(paper_tables, 'count_model', lambda cfg, shape: (cfg.model.backbone.get('deploy'), shape))
    rows = [
        (ROW, (None, (800, 1280))),
        (ROW._replace(source='hMHSA/cFFN Tab. 4'), (True, (800, 1280))),
        (ROW._replace(task='mmseg', recipe='UperNet 160k'), (None, (512, 2048))),
        (ROW._replace(task='mmpretrain', recipe='384', resolution=384), (None, (384, 384))),
    ]
    for row, expected in rows:
        path = tmp_path / f'{row.name}.py'
        path.parent.mkdir(exist_ok=True)
        path.write_text('model = dict(backbone=dict())')
        assert paper_tables.measure(row, tmp_path) == expected
    assert [row.name for row, _ in rows[1:]] == [
        *('mmdet/ravlt_t_maskrcnn_1x', 'mmseg/ravlt_t_upernet_160k', 'mmpretrain/ravlt_t_in1k')
    ]


def test_rows_of_the_papers_are_read_whole(tmp_path, monkeypatch):
    (tmp_path / 'detection.csv').write_text(
        'backbone,method,schedule,params_M,flops_G_1280x800,AP_b,AP50_b,AP75_b,AP_m,AP50_m,AP75_m,source\n'
        'InLine-PVT-T,Cascade Mask R-CNN,3x+MS,33,211,40.2,62.7,43.8,37.7,59.7,,InLine Tab. 7\n'
    )
    (tmp_path / 'segmentation.csv').write_text(
        'backbone,method,schedule,params_M,flops_G_512x2048,mIoU,mAcc,source\n'
        'RAVLT-B,Semantic FPN,80k,,,47.9,,RALA Tab. 4\n'
    )
    (tmp_path / 'classification.csv').write_text(
        'model,resolution,params_M,released_params_M,flops_G,top1,source\n'
        'InLine-Swin-B,384,88,87.9,45,84.5,InLine Tab. 6\n'
    )
    monkeypatch.setattr(published, 'TABLES', tmp_path)
    (row,) = published.read_rows('mmdet')
    box = {'box AP': 40.2, 'box AP50': 62.7, 'box AP75': 43.8, 'mask AP': 37.7, 'mask AP50': 59.7}
    assert row == Row('mmdet', 'InLine-PVT-T', 'Cascade Mask R-CNN 3x+MS', 'InLine Tab. 7', '33', '', '211', box, None)
    assert row.name == 'mmdet/inline_pvt_t_cascade_3x' and row.paper == 'InLine' and row.link is None
    (row,) = published.read_rows('mmseg')
    assert row == Row('mmseg', 'RAVLT-B', 'Semantic FPN 80k', 'RALA Tab. 4', '', '', '', {'mIoU': 47.9}, None)
    assert row.stem == 'ravlt_b_fpn_80k' and row.link == published.released_checkpoints()['ravlt_b_fpn_80k'].link
    (row,) = published.read_rows('mmpretrain')
    top = {'Top 1 Accuracy': 84.5}
    assert row == Row('mmpretrain', 'InLine-Swin-B', '384', 'InLine Tab. 6', '88', '87.9', '45', top, 384)
    methods = {'RetinaNet 1x': 'retinanet_1x', 'UperNet 160k': 'upernet_160k', 'Mask R-CNN 3x+MS': 'maskrcnn_3x'}
    for recipe, stem in methods.items():
        assert ROW._replace(recipe=recipe).stem == f'ravlt_t_{stem}'


def test_the_tool_of_the_tables(monkeypatch, tmp_path, capsys):
    names = runpy.run_path(str(TOOLS / 'paper_tables.py'), run_name='tool')['main'].__globals__
    asked = []
    monkeypatch.setitem(names, 'read_rows', lambda task: [f'{task} 1', f'{task} 2'])
    monkeypatch.setitem(names, 'measure', lambda row, configs: asked.append((row, configs)) or row[-1])
    monkeypatch.setitem(names, 'page', repr)

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['paper_tables.py', *args])
        names['main']()
        return capsys.readouterr().out.strip()

    pairs = [(f'{task} {i}', str(i)) for task in ('mmpretrain', 'mmdet', 'mmseg') for i in (1, 2)]
    assert run() == repr(pairs) and {configs for _, configs in asked} == {ROOT / 'configs'}
    out = tmp_path / 'new' / 'deep' / 'page.md'
    assert run('--task', 'mmseg', '--out', str(out)) == str(out) and out.read_text() == repr(pairs[4:])
    with pytest.raises(SystemExit):
        run('--task')  # of no task is no page
    assert 'argument --task: expected at least one argument' in capsys.readouterr().err


# --- attentions -------------------------------------------------------------------------------------------------------


def test_the_page_of_attentions(monkeypatch):
    """Descriptions, gates and costs as they are; numbers that take long stand for themselves."""
    monkeypatch.setattr(attentions, 'kept_for_backward', lambda name: len(name))
    monkeypatch.setattr(attentions, 'cost_in', lambda host, name: (len(host), len(name) / 8))
    lines = attentions.page().splitlines()
    assert lines[0] == '# Attentions'
    assert '| attention | source | equation | operations | kept | gate | sees positions through |' in lines
    rala = attentions.ABOUT['rala']
    assert (
        f'| `rala` | {rala.source} | {rala.equation} | N C d | 4.0 | a projection of the input | {rala.position} |'
        in lines
    )
    hydra = next(line for line in lines if line.startswith('| `hydra` | Bolya'))
    assert hydra.split(' | ')[3:6] == ['N C', '5.0', 'the host’s, if it has one']
    sizes = 'tiny tiny b1 tiny tiny tiny small'.split()
    head = ' | '.join(f'`{host}` {size}' for host, size in zip(attentions.HOSTS, sizes))
    assert f'| attention | {head} |' in lines
    cells = ' | '.join(f'{len(host)}.00, 0.62' for host in attentions.HOSTS)
    assert f'| `hydra` | {cells} |' in lines
    quadratic = {name for name, about in attentions.ABOUT.items() if about.complexity == 'N² C'}
    assert quadratic == {'softmax', 'hallucinated'}


def test_costs_of_an_attention_in_a_host():
    """Those of the page, which are those of the papers but for the classifier: DeiT-T has 5.72 M and 1.26 G with it."""
    params, macs = attentions.cost_in('LinearDeiT', 'softmax')
    assert params == pytest.approx(5.717 - 0.193, abs=0.002) and macs == pytest.approx(1.26, abs=0.01)
    page = (ROOT / 'docs' / 'attentions.md').read_text(encoding='utf-8')
    (row,) = (line for line in page.splitlines() if line.startswith('| `softmax` |') and 'Vaswani' not in line)
    assert row.split(' | ')[1 + list(attentions.HOSTS).index('LinearDeiT')] == f'{params:.2f}, {macs:.2f}'
    assert set(attentions.HOSTS) == set(backbones.__all__)


def test_the_tool_of_attentions(monkeypatch, tmp_path, capsys):
    names = runpy.run_path(str(TOOLS / 'attention_table.py'), run_name='tool')['main'].__globals__
    monkeypatch.setitem(names, 'page', lambda: 'φ')
    out = tmp_path / 'new' / 'deep' / 'page.md'
    monkeypatch.setattr(sys, 'argv', ['attention_table.py', '--out', str(out)])
    names['main']()
    assert out.read_text(encoding='utf-8') == 'φ' and capsys.readouterr().out.strip() == str(out)
    (tmp_path / 'docs').mkdir()
    monkeypatch.setitem(names, 'ROOT', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['attention_table.py'])
    names['main']()
    assert (tmp_path / 'docs' / 'attentions.md').read_text(encoding='utf-8') == 'φ'
