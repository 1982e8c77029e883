# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What get_flops counts: against numbers worked out by hand and those measured on the released models."""

import runpy
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from config_helpers import ROOT, load
from mmengine.config import Config
from torch import nn

import mmlinattn  # noqa: F401
from mmlinattn.analysis.counting import CONV, KINDS, LINEAR, PRODUCT, Count
from mmlinattn.analysis.flops import Cost, count_model, part_of
from mmlinattn.attention import Grid, HallucinatedMixer
from mmlinattn.utils.errors import RunError

# RAVLT t s b l, G multiply-adds at 224x224: convolutions and linear layers; all with norms, hybrid and fully linear
LAYERS = {'t': 2.41, 's': 4.51, 'b': 9.80, 'l': 16.09}
HYBRID = {'t': 2.63, 's': 4.90, 'b': 10.62, 'l': 17.26}
LINEAR_ONLY = {'t': 2.55, 's': 4.75, 'b': 10.38, 'l': 16.83}


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        x = self.linear(self.conv(x).flatten(2).transpose(1, 2))
        state = x.transpose(1, 2) @ x
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]), state


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_counts_by_kind_and_module(device):
    with torch.device(device):
        model, x = Toy(), torch.zeros(2, 4, 5, 7)
    with torch.no_grad(), Count(model) as count:
        model(x)
    tokens = 2 * 5 * 7
    assert count.macs == {
        ('conv', CONV): tokens * 8 * 2 * 9,
        ('linear', LINEAR): tokens * 8 * 6,
        ('', PRODUCT): tokens * 6 * 6 + 2 * tokens * 35 * 6,
    }


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 5, bias=False)]

    def forward(self, x):
        return self.layers[0](x)


def test_modules_without_a_name_count_as_part_of_those_that_call_them():
    model = nn.Sequential(Unregistered(), nn.Linear(5, 2))
    with torch.no_grad(), Count(model) as count:
        model(torch.zeros(7, 3))
    assert count.macs == {('0', LINEAR): 7 * 3 * 5, ('1', LINEAR): 7 * 5 * 2}


class Turned(nn.Module):
    """A linear layer over a map whose rows are not contiguous, which without gradients is a batched product."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6).requires_grad_(False)

    def forward(self, x):
        return self.linear(x.permute(0, 2, 3, 1))


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_linear_layers_are_linear_layers_however_pytorch_computes_them(device):
    with torch.device(device):
        model, x = Turned(), torch.zeros(2, 8, 5, 7)
    with torch.no_grad(), Count(model) as count:
        model(x)
    assert count.macs == {('linear', LINEAR): 2 * 5 * 7 * 8 * 6}


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_hallucinated_attention_counts_as_its_paper_counts(device):
    """Maps of all heads with their values, a 3x3 over half of them and their mixture; no map is seen in memory."""
    with torch.device(device):
        mixer = HallucinatedMixer(24, 3)
        q, k, v = torch.zeros(2, 30, 12), torch.zeros(2, 20, 12), torch.zeros(2, 20, 24)
    with torch.no_grad(), Count(mixer) as count:
        assert mixer(q, k, v, Grid(5, 6), Grid(4, 5)).shape == (2, 30, 24)
    assert count.macs == {('', PRODUCT): 2 * 30 * 20 * (12 + 24 + 9 * 3 + 3 * 3)}
    assert count.peak_bytes < 2 * 4 * 30 * 24 * 4


def test_peak_memory_is_what_is_alive_at_one_time():
    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(5):
                x = x * 2  # the one before is freed when the name moves on
            return x

    x = torch.zeros(1000, device='meta')
    with Count(Chain()) as count:
        Chain()(x)
    assert count.peak_bytes == 2 * 4000


def test_attention_of_many_tokens_keeps_no_map():
    q = torch.zeros(1, 1, 100_000, 8, device='meta')
    with Count(nn.Identity()) as count:
        F.scaled_dot_product_attention(q, q, q)
    assert count.peak_bytes == 100_000 * 8 * 4


@pytest.mark.parametrize('size', 'tsbl')
def test_ravlt_costs(size):
    pytest.importorskip('mmpretrain')
    cfg = load(f'mmpretrain/ravlt_{size}_in1k').copy()
    cost = count_model(cfg)
    assert cost.shape == (224, 224)
    assert cost.layer_macs / 1e9 == pytest.approx(LAYERS[size], abs=0.01)
    assert (cost.total_macs() + cost.norm_ops) / 1e9 == pytest.approx(HYBRID[size], abs=0.01)
    cfg.merge_from_dict({'model.backbone.stage_attns': ('rala',) * 4, 'model.backbone.frozen_stages': 1})
    linear = count_model(cfg)
    assert linear.layer_macs == cost.layer_macs
    assert linear.params['backbone.stage1'] == cost.params['backbone.stage1']  # frozen ones are parameters too
    assert (linear.total_macs() + linear.norm_ops) / 1e9 == pytest.approx(LINEAR_ONLY[size], abs=0.01)


def test_linear_model_costs_grow_with_the_pixels():
    pytest.importorskip('mmpretrain')
    cfg = load('mmpretrain/ravlt_t_in1k').copy()
    cfg.merge_from_dict({'model.backbone.stage_attns': ('rala',) * 4})
    small, large = (count_model(cfg, (side, side)) for side in (256, 1024))

    def backbone(cost):
        return sum(macs for (part, _), macs in cost.macs.items() if part.startswith('backbone'))

    assert backbone(large) == pytest.approx(16 * backbone(small), rel=1e-6)
    assert large.peak_bytes == pytest.approx(16 * small.peak_bytes, rel=0.05)


def test_two_stage_parts_by_hand():
    pytest.importorskip('mmdet')
    cost = count_model(load('mmdet/ravlt_t_maskrcnn_1x'))
    assert cost.shape == (800, 1280)
    # 1000 RoIs: 7 * 7 * 256 -> 1024 -> 1024 -> 81 classes and 80 boxes
    fc = 1000 * (7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    assert cost.macs['roi_head.bbox_head', LINEAR] == fc
    # 100 RoIs: four 3x3 and, at twice the size, a transposed 2x2 and the logits
    convs = 100 * (14 * 14 * 4 * 256 * 256 * 9 + 14 * 14 * 256 * 256 * 4 + 28 * 28 * 256 * 80)
    assert cost.macs['roi_head.mask_head', CONV] == convs
    # RPN on strides 4 to 64
    pixels = sum(-(-800 // stride) * -(-1280 // stride) for stride in (4, 8, 16, 32, 64))
    assert cost.macs['rpn_head', CONV] == pixels * (256 * 256 * 9 + 256 * 3 * 5)


def test_auxiliary_head_has_parameters_and_no_cost():
    pytest.importorskip('mmseg')
    cost = count_model(load('mmseg/ravlt_t_upernet_160k'))
    assert cost.shape == (512, 2048)
    assert cost.params['auxiliary_head'] > 0 and not cost.macs['auxiliary_head', CONV]
    assert any('auxiliary' in note for note in cost.notes)


def test_parts():
    assert part_of('backbone.stages.2.5.attn.qkv') == 'backbone.stage3'
    assert part_of('backbone.patch_embeds.0.layers.0') == 'backbone.stage1'
    assert part_of('backbone.layer2.0.conv1') == 'backbone.stage2'
    assert part_of('roi_head.bbox_head.1.fc_cls') == 'roi_head.bbox_head'
    assert part_of('neck.lateral_convs.0') == 'neck'


def run_tool(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['get_flops.py', *map(str, args)])
    runpy.run_path(str(ROOT / 'tools/analysis_tools/get_flops.py'), run_name='__main__')


def test_tool_prints_totals_and_downloads_nothing(monkeypatch, capsys):
    pytest.importorskip('mmdet')
    monkeypatch.setattr('torch.hub.download_url_to_file', lambda *_, **__: pytest.fail('a download'))
    run_tool(monkeypatch, ROOT / 'configs/mmdet/ravlt_t_maskrcnn_1x.py', '--shape', '320', '480')
    out = capsys.readouterr().out
    assert 'image 320 x 480' in out and 'backbone.stage4' in out and '1000 proposals' in out
    (total,) = (line.split() for line in out.splitlines() if line.startswith('total'))
    assert float(total[1]) == pytest.approx(33.50, abs=0.01)
    assert float(total[-1]) == pytest.approx(sum(map(float, total[2:5])), abs=0.002)


def test_the_report_is_in_millions_billions_and_mebibytes():
    report = runpy.run_path(str(ROOT / 'tools/analysis_tools/get_flops.py'))['report']
    first, second, *others = KINDS
    macs = Counter({('backbone', first): 2_000_000_000, ('head', second): 500_000_000})
    params = dict(backbone=3_000_000, head=1_600, auxiliary_head=500_000)  # the last does not run
    cost = Cost((64, 96), params, macs, 4_000_000_000, 100 * 2**20, ['of something'])
    lines = [line.split() for line in report(cost).splitlines()]
    empty = ['0.000'] * len(others)
    assert lines[0] == 'image 64 x 96 (height x width), batch 1'.split()
    assert lines[2] == ['backbone', '3.000', '2.000', '0.000', *empty, '2.000']
    assert lines[3] == ['head', '0.002', '0.000', '0.500', *empty, '0.500']
    assert lines[4] == ['auxiliary_head', '0.500', '0.000', '0.000', *empty, '0.000']
    assert lines[5] == ['total', '3.502', '2.000', '0.500', *empty, '2.500']
    assert lines[6][-3:] == ['4.000', 'G', 'operations'] and lines[7][-2:] == ['100', 'MiB']
    assert lines[8] == ['note:', 'of', 'something'] and len(lines) == 9


def test_usage_names_height_first(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_tool(monkeypatch, '--help')
    assert '[--shape H W]' in ' '.join(capsys.readouterr().out.split())


def test_tool_counts_what_the_options_say(monkeypatch, capsys):
    pytest.importorskip('mmpretrain')
    sizes = []
    for options in ([], ['--cfg-options', 'model.head.num_classes=10']):
        run_tool(monkeypatch, ROOT / 'configs/mmpretrain/ravlt_t_in1k.py', '--shape', 32, 32, *options)
        (head,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith('head'))
        sizes.append(float(head[1]))
    assert sizes == [1.025, 0.01]  # M: a matrix of 1024 x classes and a bias


@pytest.mark.parametrize(
    'args, message',
    [
        (['--shape', '16', '480'], 'shape 16 480'),
        ([], 'no such file'),
        (['--cfg-options', 'model.backbone.arch=foo'], 'ValueError: '),
        (['--cfg-options', 'model.backbone.foo=1'], 'TypeError: '),
        (['--cfg-options', 'model.neck.3=1'], 'cannot be run: '),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, args, message):
    pytest.importorskip('mmdet')
    monkeypatch.delenv('MMLINATTN_TRACEBACK', raising=False)
    config = ROOT / 'configs/mmdet/ravlt_t_retinanet_1x.py' if args else 'nowhere.py'
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, config, *args)
    error = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and error[-1].startswith('error:') and message in error[-1]


def test_no_weights_are_read_where_a_model_is_only_built(monkeypatch):
    """Not even those of a teacher, which MMDetection reads as it builds the student."""
    from mmengine.registry import MODELS

    class Student(nn.Linear):
        def __init__(self, teacher_ckpt, data_preprocessor):
            super().__init__(2, 1)
            assert teacher_ckpt is None

        def train(self, mode=True):  # as MMDetection's, which do not return themselves
            super().train(mode)

        def forward(self, inputs, mode):
            return inputs

    monkeypatch.setitem(MODELS._module_dict, 'StudentToy', Student)
    cfg = Config(dict(model=dict(type='StudentToy', teacher_ckpt='gone.pth')))
    assert count_model(cfg).total_params == 3
    assert cfg.model.teacher_ckpt == 'gone.pth'


def test_model_that_depends_on_values_is_refused(monkeypatch):
    from mmengine.registry import MODELS

    class Adaptive(nn.Module):
        def __init__(self, **_):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, inputs, mode):
            return inputs if inputs.sum() > 0 else -inputs

    monkeypatch.setitem(MODELS._module_dict, 'AdaptiveToy', Adaptive)
    with pytest.raises(RunError, match='Adaptive cannot be counted'):
        count_model(Config(dict(model=dict(type='AdaptiveToy'))))
