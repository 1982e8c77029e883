# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What inspect_attention.py does around a model: what it asks for, puts together, writes and says."""

import contextlib
import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from config_helpers import ROOT
from mmengine.config import Config
from mmengine.registry import DATASETS
from rich.progress import Progress
from torch import nn

from mmlinattn.analysis import inspecting, loading, masking, measures, pictures
from mmlinattn.analysis.capture import CLASS_TOKEN, PADDING, MixerCall, watched
from mmlinattn.analysis.masking import masked, masked_weights, masking_accuracies, token_places
from mmlinattn.attention import (
    GlobalAttention,
    Grid,
    ReducedAttention,
    StripeAttention,
    TokenMixer,
    WindowAttention,
    get_mixer,
)
from mmlinattn.backbones import LinearDeiT
from mmlinattn.utils.errors import RunError

TOOL = ROOT / 'tools' / 'analysis_tools' / 'inspect_attention.py'


class Model(nn.Module):
    """Two blocks; a picture is its tokens."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.one, self.backbone.two = GlobalAttention(8, 2, 'inline'), GlobalAttention(8, 1, 'softmax')
        self.backbone.forward = lambda x: self.backbone.two(self.backbone.one(x))


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool on a small model, with plots that are only asked for."""
    names = runpy.run_path(str(TOOL), run_name='tool')['main'].__globals__
    seen = SimpleNamespace(plots=[], loaded=[], model=Model().eval(), names=names)
    sizes = iter(((5, 6), (4, 4)))

    def prepare(cfg, model, image, name, shape):
        height, width = image.shape[:2]
        inputs = torch.randn(1, *next(sizes), 8)
        picture = loading.Picture(name, image[::2, ::2], inputs, None, ((2.0, 0.0),) * 2, (width, height))
        seen.shape = shape
        return picture

    monkeypatch.setattr(loading, 'read_picture', lambda path: np.zeros((40, 60, 3), np.uint8))
    monkeypatch.setattr(
        loading, 'load_model', lambda *args: seen.loaded.append((args, torch.rand(1).item())) or seen.model
    )
    monkeypatch.setattr(loading, 'prepare', prepare)
    monkeypatch.setattr(pictures, 'token_at', lambda *_: (1, 2))
    for kind in ('plot_query', 'plot_full', 'plot_masking'):
        keep = lambda *args, kind=kind, **more: seen.plots.append((kind, args, more))  # noqa: E731
        monkeypatch.setattr(pictures, kind, keep)
    monkeypatch.setattr(
        pictures, 'plot_measures', lambda *args: seen.plots.append(('measures', args, {})) or ['a', 'b']
    )
    monkeypatch.setitem(names, 'read_config', lambda path: Config(dict(default_scope='mmpretrain', a=dict(b=1))))
    monkeypatch.setitem(names, 'check_checkpoint', lambda path, name: f'{name} {path}')
    for name in ('one.jpg', 'two.png'):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['inspect_attention.py', 'folder/mine.py', *map(str, args)])
        names['main']()
        return json.loads((tmp_path / 'out' / 'summary.json').read_text()), seen

    return run


def test_several_pictures(tool, tmp_path, capsys):
    """Numbers are means over them; each has its drawings, by its number and name, about its middle."""
    summary, seen = tool('none', 'one.jpg', 'two.png', '--out', 'out', '--num-queries', 7)
    assert summary['images'] == [
        dict(image=name, query=[30, 20], shown=[20, 30], query_shown=[15, 10]) for name in ('one.jpg', 'two.png')
    ]
    assert (summary['config'], summary['checkpoint'], len(summary['blocks'])) == ('folder/mine.py', 'none', 2)
    settings = summary['settings']
    assert settings['num_queries'] == 7 and settings['confusion_distance'] == 1e-3 and summary['version']
    one, two = summary['blocks']
    assert (one['block'], one['mixer'], two['block'], two['mixer']) == (
        'backbone.one',
        'inline',
        'backbone.two',
        'softmax',
    )
    assert one['map'] == one['key_map'] == [[5, 6], [4, 4]] and one['sampled_queries'] == 7
    assert one['keys_a_window'] == (30 + 16) / 2 and len(one['locality']['sum']) == 2
    assert seen.shape is None and seen.loaded[0][0][1:] == ('none', 'cpu')
    (measures,) = (args for kind, args, _ in seen.plots if kind == 'measures')
    everything = ['rank', 'confusion', 'locality', 'sharpness', 'ccs', 'maps']
    assert measures == (summary['blocks'], everything, Path('out'), 'mine (random weights)')
    drawn = [(kind, args, more) for kind, args, more in seen.plots if kind != 'measures']
    assert [(kind, str(args[-1]), more) for kind, args, more in drawn] == [
        (kind, f'out/maps/{i}_{name}_{rest}.png', more)
        for i, name in enumerate(('one', 'two'))
        for kind, rest, more in (
            ('plot_query', 'query_30_20', {}),
            ('plot_query', 'query_30_20_with_local', dict(local=True)),
            ('plot_full', 'full', {}),
        )
    ]
    query, local, full = (args for _, args, _ in drawn[:3])
    assert [maps.block for maps in query[0]] == ['backbone.one', 'backbone.two']
    assert [maps.block for maps in local[0]] == ['backbone.one']  # the other has no convolution of the values
    assert query[1].name == '0_one' and query[2:4] == ((15, 10), (30, 20))
    assert not np.allclose(query[0][0].maps, local[0][0].maps) and query[0][0].token == (1, 2)
    assert [(block, mixer, maps.shape) for block, mixer, maps in full[0]] == [
        ('backbone.one', 'inline', (2, 30, 30)),
        ('backbone.two', 'softmax', (1, 30, 30)),
    ]
    assert full[1] == '0_one'
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith('2 blocks; weights @ v against the forward pass: ') and said[0].endswith(' at most')
    worst = max(block['forward_error'] for block in summary['blocks'])
    assert f'{worst:.1e}' in said[0] and said[1] == 'out/summary.json and 2 plot(s), maps/'


def test_a_query_and_a_shape(tool, capsys):
    args = '--query', 10, 30.5, '--shape', 64, 96, '--what', 'ccs', 'rank', '--device', 'cpu'
    summary, seen = tool('file.pth', 'one.jpg', '--out', 'out', *args, '--cfg-options', 'a.b=2')
    assert summary['images'] == [dict(image='one.jpg', query=[10, 30.5], shown=[20, 30], query_shown=[5, 15])]
    assert seen.shape == [64, 96] and seen.loaded[0][0][1:] == ('checkpoint file.pth', 'cpu')
    assert seen.loaded[0][0][0].a.b == 2 and summary['checkpoint'] == 'checkpoint file.pth'
    ((kind, args, _),) = seen.plots  # no maps were asked for
    assert kind == 'measures' and args[1] == ['ccs', 'rank'] and args[3] == 'mine'
    assert {'ccs', 'rank'} < set(summary['blocks'][0]) and 'locality' not in summary['blocks'][0]
    assert capsys.readouterr().out.splitlines()[1] == 'out/summary.json and 2 plot(s)'


def test_a_shape_without_a_query_is_looked_at_in_its_middle(tool):
    summary, _ = tool('none', 'one.jpg', '--out', 'out', '--shape', 64, 96, '--what', 'ccs')
    assert summary['images'] == [dict(image='one.jpg', query=[30, 20], shown=[20, 30], query_shown=[15, 10])]


def test_random_weights_do_not_depend_on_what_was_drawn_before(tool):
    torch.rand(5)
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    torch.manual_seed(0)
    assert seen.loaded[0][1] == torch.rand(1).item()


def test_masking_is_put_into_the_summary(tool, monkeypatch):
    asked = []

    def masking_accuracies(model, loader, number, done):
        done(1, 2)
        asked.append((model, loader, number))
        return dict(pictures=4, accuracy=dict(none=50.0))

    dataset = dict(type='RepeatDataset', times=2, dataset=dict(type='CustomDataset', data_root='old'))
    cfg = Config(dict(default_scope='mmpretrain', test_dataloader=dict(dataset=dataset)))
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    assert 'masking' not in _
    monkeypatch.setitem(seen.names, 'masking_accuracies', masking_accuracies)
    for args, root in ((['--data-root', 'new'], 'new'), ([], 'old')):
        monkeypatch.setitem(seen.names, 'read_config', lambda path: Config(cfg.to_dict()))
        monkeypatch.setattr(loading, 'prepare', lambda cfg, model, image, name, shape: SMALL_PICTURE)
        summary, _ = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs', '--masking', 9, *args)
        assert summary['masking'] == dict(pictures=4, accuracy=dict(none=50.0))
        assert (
            asked[-1][0] is seen.model
            and asked[-1][2] == 9
            and asked[-1][1] == dict(dataset=dict(dataset, dataset=dict(dataset['dataset'], data_root=root)))
        )
        kind, args, _ = seen.plots[-1]
        assert kind == 'plot_masking' and args[0] == dict(none=50.0) and str(args[1]) == 'out/masking.png'
        assert args[2] == 'mine (random weights)'


def test_bars_go_to_their_ends(tool, monkeypatch):
    """Blocks of all pictures; then the pictures that are masked, of which batches are said to be done."""
    bars = []

    def masking_accuracies(model, loader, number, done):
        for batch in (16, 16, 8):
            done(batch, 40)
            steps.append(bars[-1].tasks[0].completed)
        return dict(pictures=40, accuracy=dict(none=50.0))

    class Bar(Progress):
        def __init__(self, **options):
            super().__init__(**options)
            bars.append(self)

    names, steps = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')[1].names, []
    monkeypatch.setattr(loading, 'prepare', lambda *_: SMALL_PICTURE)
    monkeypatch.setitem(names, 'masking_accuracies', masking_accuracies)
    monkeypatch.setitem(names, 'read_config', lambda path: Config(dict(default_scope='mmpretrain', test_dataloader={})))
    monkeypatch.setitem(names, 'Progress', Bar)
    tool('none', 'one.jpg', 'two.png', 'one.jpg', '--out', 'out', '--what', 'ccs', '--masking', 40)
    assert [[(task.completed, task.total) for task in bar.tasks] for bar in bars] == [[(6, 6)], [(40, 40)]]
    assert steps == [16, 32, 40] and all(bar.disable and bar.console.stderr for bar in bars)  # no terminal here


SMALL_PICTURE = loading.Picture(
    'p', np.zeros((8, 8, 3), np.uint8), torch.zeros(1, 4, 4, 8), None, ((1.0, 0),) * 2, (8, 8)
)


def test_settings_and_seeds(tool, monkeypatch):
    """As docs/inspect.md has them: 196 queries, drawn alike for every picture; no checkpoint in any case of letters."""
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    seeds, measure = [], seen.names['measure_block']

    def measured(block, what, number, generator):
        seeds.append((number, generator.initial_seed(), generator.get_state().tolist()))
        return measure(block, what, number, generator)

    monkeypatch.setitem(seen.names, 'measure_block', measured)
    monkeypatch.setattr(loading, 'prepare', lambda *_: SMALL_PICTURE)
    summary, _ = tool('NONE', 'one.jpg', 'two.png', '--out', 'out', '--what', 'sharpness')
    assert summary['settings'] == dict(
        num_queries=196,
        confusion_distance=1e-3,
        rank='singular values above max(rows, columns) * eps(float32) * the largest',
        above_1_percent='singular values above 1 % of the largest',
        effective='exp of the entropy of the singular values as a distribution',
    )
    assert len(seeds) == 4 and {seed[:2] for seed in seeds} == {(196, 0)} and seeds[0] == seeds[2]
    assert seen.loaded[1][0][1] == summary['checkpoint'] == 'NONE' and seen.plots[-1][1][3] == 'mine (random weights)'
    assert tool('none', 'one.jpg', '--out', 'out', '--num-queries', 2)[0]['settings']['num_queries'] == 2  # the least


def test_out_may_lie_in_folders_that_are_not_there(tool):
    tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    tool('none', 'one.jpg', '--out', 'new/deep', '--what', 'ccs')
    assert Path('new/deep/summary.json').is_file()


@pytest.mark.parametrize('errors', [(3e-4, 2e-5), (2e-5, 3e-4)])
def test_the_largest_error_is_said(tool, monkeypatch, capsys, errors):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    measure, given = seen.names['measure_block'], iter(errors)
    measured = lambda *args: {**measure(*args), 'forward_error': next(given)}  # noqa: E731
    monkeypatch.setitem(seen.names, 'measure_block', measured)
    capsys.readouterr()
    tool('none', 'two.png', '--out', 'out', '--what', 'ccs')
    said = capsys.readouterr().out.splitlines()[0]
    assert said == '2 blocks; weights @ v against the forward pass: 3.0e-04 at most'


class Averages(GlobalAttention):
    """Keys that lie on no map."""

    reduction = 'sequence'


class Turned(GlobalAttention):
    """Tokens in an order that nobody else has."""

    def forward(self, x, **shared):
        return super().forward(x.reshape(1, 2, -1, x.shape[-1])).view_as(x)


def test_keys_that_lie_on_no_map_are_in_full_maps_only(tool):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    seen.model.backbone.one = Averages(8, 2, 'softmax').eval()
    tool('none', 'one.jpg', '--out', 'out', '--what', 'maps')
    (query, found), (full, both) = ((kind, args[0]) for kind, args, _ in seen.plots[-3:-1])
    assert (query, full) == ('plot_query', 'plot_full')
    assert [maps.block for maps in found] == ['backbone.two']
    assert [name for name, *_ in both] == ['backbone.one', 'backbone.two']


def test_no_map_of_a_query_where_no_key_lies_on_one(tool, monkeypatch):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    seen.model.backbone.one = seen.model.backbone.two = Averages(8, 2, 'softmax').eval()
    seen.plots.clear()
    tool('none', 'one.jpg', '--out', 'out', '--what', 'maps')
    assert [kind for kind, *_ in seen.plots] == ['plot_full', 'measures']


@pytest.mark.parametrize('wrong', ['arrangement', 'pictures'])
def test_what_cannot_be_looked_into_is_one_line(tool, monkeypatch, capsys, wrong):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    if wrong == 'arrangement':
        seen.model.backbone.one = Turned(8, 2, 'softmax').eval()
        message = 'Turned lays its tokens in a way that the analysis does not know'
    else:
        two = SMALL_PICTURE._replace(inputs=torch.zeros(2, 4, 4, 8))
        monkeypatch.setattr(loading, 'prepare', lambda *_: two)
        message = 'attentions are looked into one image at a time, not 2'
    with pytest.raises(SystemExit):
        tool('none', 'one.jpg', '--out', 'out')
    assert ' '.join(capsys.readouterr().err.split()) == f'error: {message}'


@pytest.mark.parametrize(
    ('scope', 'args', 'message'),
    [
        ('mmaction', [], 'folder/mine.py: default_scope is none of mmdet, mmseg, mmpretrain.'),
        (None, [], 'folder/mine.py: default_scope is none of'),
        ('mmdet', ['--masking', 3], '--masking 3: a number of pictures, and the config has to be of a classifier.'),
        ('mmdet', ['--shape', 64, 31], '--shape 64 31: height and width have to be at least 32.'),
        ('mmseg', ['gone.jpg'], "image 'gone.jpg': no such file."),
        ('mmseg', ['--out', 'one.jpg'], "--out 'one.jpg' cannot be written: File exists."),
    ],
)
def test_what_is_refused_before_a_model_is_built(tool, monkeypatch, capsys, scope, args, message):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    monkeypatch.setitem(seen.names, 'read_config', lambda path: Config(dict(default_scope=scope)))
    with pytest.raises(SystemExit):
        tool('none', 'one.jpg', *args, *([] if '--out' in args else ['--out', 'out']))
    assert message in ' '.join(capsys.readouterr().err.split()) and len(seen.loaded) == 1


def test_models_and_arrangements_that_are_not_known(tool, monkeypatch, capsys):
    _, seen = tool('none', 'one.jpg', '--out', 'out', '--what', 'ccs')
    seen.model = SimpleNamespace(backbone=nn.Linear(1, 1), named_modules=nn.Linear(1, 1).named_modules)
    with pytest.raises(SystemExit):
        tool('none', 'one.jpg', '--out', 'out')
    assert 'folder/mine.py: its backbone Linear has no attention of mmlinattn.' in ' '.join(
        capsys.readouterr().err.split()
    )


# --- samples and means ------------------------------------------------------------------------------------------------


def calls_of(model, x):
    found = []
    with watched(nn.Sequential(model), found.append):
        model(x)
    (block,) = found
    return block


def test_a_class_token_is_a_key_and_no_query():
    """24 patches of a map of 4 x 6, and a token that all of them see."""
    model = LinearDeiT(dict(embed_dims=(8,), depths=(1,), num_heads=(2,), stage_attns=('softmax',))).eval()
    found = []
    with watched(model, lambda block: found.append((block, inspecting.measure_block(block)))):
        model(torch.randn(1, 3, 64, 96))
    ((block, entry),) = found
    assert (entry['map'], entry['key_map'], entry['sampled_queries']) == ([4, 6], [4, 6], 24)
    assert entry['queries_a_window'] == entry['keys_a_window'] == 25 and entry['windows'] == 1
    assert entry['locality']['chance'] == pytest.approx(9 / 25)
    # of 4 corners 4 keys, of 12 tokens at the border 6, of 8 others 9
    assert entry['locality']['if_uniform'] == pytest.approx((4 * 4 + 12 * 6 + 8 * 9) / 24 / 25)
    assert entry['sharpness']['entropy_if_uniform'] == pytest.approx(math.log(25))
    assert entry['confusion']['share'] == [0, 0] and entry['rank']['output']['at_most'] == 4
    weights, classes = inspecting.query_map(block, 1, 2)
    torch.testing.assert_close(weights.sum(dim=(1, 2)) + classes, torch.ones(2))
    whole = block.calls[0].weights(0, torch.tensor([1 + 1 * 6 + 2]))[:, 0]
    torch.testing.assert_close(torch.cat((classes[:, None], weights.flatten(1)), dim=1), whole)
    # all patches alike: their pairs, none with the class token
    for parameter in block.attention.qkv.parameters():
        nn.init.zeros_(parameter)
    with watched(model, lambda block: found.append(inspecting.measure_block(block, ('confusion',)))):
        model(torch.randn(1, 3, 64, 96))
    assert found[1]['confusion']['share'] == [1, 1]
    assert found[1]['confusion']['pairs_an_image'] == pytest.approx([24 * 23 / 2] * 2)


def test_no_rank_is_larger_than_there_are_rows_or_columns():
    """Of 5 sampled queries of 20 keys; of a state of 4 x 4; of two tokens of 4 channels."""
    block = calls_of(GlobalAttention(8, 2, 'inline').eval(), torch.randn(1, 4, 5, 8))
    rank = inspecting.measure_block(block, ('rank',), 5)['rank']
    assert {name: part['at_most'] for name, part in rank.items()} == dict(
        weights=5, weights_with_local=5, state=4, output=4, projected=4
    )
    block = calls_of(GlobalAttention(8, 2, 'softmax').eval(), torch.randn(1, 1, 2, 8))
    rank = inspecting.measure_block(block, ('rank',))['rank']
    assert {name: part['at_most'] for name, part in rank.items()} == dict(weights=2, output=2, projected=2)


def test_the_largest_rank_of_a_state_with_more_channels_of_keys_than_of_values(monkeypatch):
    """A mixer chooses its widths."""
    monkeypatch.setattr(get_mixer('enhanced')[0], 'widths', (16, 16, 8))
    block = calls_of(GlobalAttention(8, 2, 'enhanced').eval(), torch.randn(1, 4, 5, 8))
    assert block.calls[0].state(0).shape == (2, 8, 4)
    assert inspecting.measure_block(block, ('rank',))['rank']['state']['at_most'] == 4


class Asked(TokenMixer):
    """Looks at all keys alike; keeps what it is asked for."""

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        return v.half()

    def weights(self, q, k, grid, key_grid, **given):
        self.asked = dict(q=q, k=k, grid=grid, key_grid=key_grid, **given)
        return torch.full((len(q), self.num_heads, len(given['rows']), k.shape[1]), 1 / k.shape[1])


@pytest.mark.parametrize('windows', [2, 6])
def test_each_window_is_asked_for_with_what_is_its_own(windows):
    """Of two, or of six that have two maps of regions in turn; what all share stays whole."""
    mixer, rows = Asked(4, 2), torch.tensor([1])
    q, k, v = torch.randn(3, windows, 4, 4)
    regions, mask = torch.tensor([[0, 0, 1, 1], [2, 3, 2, 3]]), torch.rand(windows, 4) < 0.5
    own, shared, plain = torch.randn(windows, 2, 4, 4), torch.randn(1, 2, 4, 4), torch.randn(2, 4, 4)
    grids = dict(grid=Grid(2, 2, regions=regions), key_grid=Grid(2, 2, regions=regions.flip(0)))
    for window in range(windows):
        for bias, expected in ((own, own[window : window + 1]), (shared, shared), (plain, plain), (None, None)):
            given = dict(q=q, k=k, v=v, **grids, mask=mask, rotary='rotary', bias=bias, context=None)
            MixerCall(mixer, given, v, None, None, None).weights(window, rows)
            asked = mixer.asked
            assert bias is None and asked['bias'] is None or torch.equal(asked['bias'], expected)
        assert torch.equal(asked['q'], q[window : window + 1]) and torch.equal(asked['k'], k[window : window + 1])
        assert torch.equal(asked['mask'], mask[window : window + 1]) and asked['rotary'] == 'rotary'
        assert asked['grid'].regions.tolist() == [regions[window % 2].tolist()] and asked['rows'] is rows
        assert asked['key_grid'].regions.tolist() == [regions[1 - window % 2].tolist()]
    given.update(mask=None)
    MixerCall(mixer, given, v, None, None, None).weights(0, rows)
    assert mixer.asked['mask'] is None


def test_masking_asks_for_the_weights_of_the_forward_pass():
    """All that a mixer was given; the output keeps its type, and its context does not matter."""
    mixer, grid, key_grid = Asked(4, 2), Grid(2, 3), Grid(1, 6)
    q, k, v = torch.randn(3, 2, 6, 4)
    given = dict(mask='mask', rotary='rotary', bias='bias')
    with masked(mixer, 1):
        out = mixer(q, k, v, grid, key_grid, **given, context='context')
    assert out.dtype == torch.float16 and not torch.equal(out, v.half())
    asked = mixer.asked
    assert {name: asked[name] for name in given} == given and 'context' not in asked
    assert torch.equal(asked['q'], q) and torch.equal(asked['k'], k) and asked['rows'].tolist() == list(range(6))
    assert (asked['grid'], asked['key_grid']) == (grid, key_grid)


def test_queries_are_spread_over_at_most_eight_windows():
    """Sixteen windows of 4 x 4: half of them, and of each its part of the queries."""
    block = calls_of(WindowAttention(8, 2, 'softmax', (4, 4)).eval(), torch.randn(1, 16, 16, 8))
    found = inspecting.sample(block.branches[0], 40, torch.Generator().manual_seed(0))
    assert len(found) == 8 and all(len(rows) == 5 for _, _, rows in found)
    windows = [window for _, window, _ in found]
    assert windows == sorted(set(windows)) and all(rows.tolist() == sorted(set(rows.tolist())) for _, _, rows in found)
    other = inspecting.sample(block.branches[0], 40, torch.Generator().manual_seed(1))
    assert [window for _, window, _ in other] != windows
    again = inspecting.sample(block.branches[0], 40, torch.Generator().manual_seed(0))
    assert [(window, rows.tolist()) for _, window, rows in again] == [(i, rows.tolist()) for _, i, rows in found]
    for number, each in ((2, [2]), (3, [3]), (5, [2, 2]), (15, [2] * 7)):  # never more, and pairs are compared
        assert [len(rows) for _, _, rows in inspecting.sample(block.branches[0], number)] == each
    assert all(len(rows) == 16 for _, _, rows in inspecting.sample(block.branches[0], 1000))
    # those of a window are no neighbours either: of 256, some from each quarter, others in each of two samples
    block = calls_of(GlobalAttention(8, 2, 'softmax').eval(), torch.randn(1, 16, 16, 8))
    generator = torch.Generator().manual_seed(0)
    one, two = (inspecting.sample(block.calls, 40, generator)[0][2].tolist() for _ in range(2))
    assert len(one) == 40 and one == sorted(set(one)) and one != two
    assert all({row // 64 for row in rows} == {0, 1, 2, 3} for rows in (one, two))


def test_class_tokens_are_not_sampled():
    attention = GlobalAttention(8, 2, 'softmax').eval()
    block = calls_of(attention, torch.randn(1, 3, 4, 8))
    (call,) = block.calls
    call = call._replace(queries=torch.tensor([[CLASS_TOKEN, PADDING, *range(10)]]))
    ((_, _, rows),) = inspecting.sample([call], 1000)
    assert rows.tolist() == list(range(2, 12))
    assert inspecting.sample([call._replace(queries=torch.full((1, 12), PADDING))], 1000) == []


def test_numbers_of_windows_and_pairs():
    """All queries alike: all pairs are confused, in each of six windows of sixteen tokens."""
    attention = WindowAttention(8, 2, 'softmax', (4, 4)).eval()
    nn.init.zeros_(attention.qkv.weight)
    found = []
    with watched(nn.Sequential(attention), lambda block: found.append(inspecting.measure_block(block, num_queries=96))):
        attention(torch.randn(1, 8, 12, 8))
    (entry,) = found
    assert (entry['block'], entry['mixer'], entry['heads']) == ('0', 'softmax', 2)
    assert (entry['windows'], entry['queries_a_window'], entry['keys_a_window']) == (6, 16, 16)
    assert entry['map'] == entry['key_map'] == [8, 12] and entry['sampled_queries'] == 96
    confusion = entry['confusion']
    assert set(confusion) == {'share', 'pairs_an_image', 'median_distance', 'mean_norm'}
    assert confusion['share'] == [1, 1] and confusion['pairs_an_image'] == [6 * 120] * 2
    assert confusion['median_distance'] == [0, 0] and confusion['mean_norm'] == pytest.approx([0.25] * 2)
    sharp = entry['sharpness']
    assert sharp['entropy'] == pytest.approx([math.log(16)] * 2) and sharp['negative'] == [0, 0]
    assert [sharp[f'top_{n}'][0] for n in (1, 9, 25)] == pytest.approx([1 / 16, 9 / 16, 1])
    assert entry['ccs'] == pytest.approx(1) and entry['locality']['chance'] == pytest.approx(9 / 16)
    assert entry['locality']['sum'] == pytest.approx([entry['locality']['if_uniform']] * 2)
    rank = entry['rank']
    assert rank['weights']['rank'] == [1, 1] and rank['weights']['at_most'] == 16
    assert rank['output']['at_most'] == rank['projected']['at_most'] == 4
    # no state, and no convolution of the values
    assert set(rank) == {'weights', 'output', 'projected'}
    assert set(entry['locality']) == {'chance', 'if_uniform', 'sum', 'share'}


def test_every_number_of_a_block(monkeypatch):
    """Worked out by hand, of four tokens in a row: two look alike, the last looks back, once with a negative weight."""
    rows_of = {
        False: torch.tensor([[[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1.2, -1.6, 0, 0]]]),
        True: torch.eye(4),
    }
    monkeypatch.setattr(
        MixerCall, 'weights', lambda self, window, rows, local=False: rows_of[local].view(1, 4, 4)[:, rows]
    )
    monkeypatch.setattr(MixerCall, 'local_kernels', lambda self: ['one'])
    monkeypatch.setattr(MixerCall, 'error', lambda self, window, rows, weights: float(weights[0, 3, 1]))
    entry = inspecting.measure_block(calls_of(GlobalAttention(8, 1, 'softmax').eval(), torch.randn(1, 1, 4, 8)))
    assert entry['forward_error'] == pytest.approx(-1.6) and entry['sampled_queries'] == 4 and entry['ccs'] is None
    confusion = dict(share=[1 / 6], pairs_an_image=[1], median_distance=[2**0.5], mean_norm=[5 / 4])
    assert entry['confusion'] == {key: pytest.approx(value) for key, value in confusion.items()}
    locality = dict(
        chance=9 / 4, if_uniform=10 / 16, sum=[3 / 4], share=[3 / 4], sum_with_local=[1], share_with_local=[1]
    )
    assert entry['locality'] == {key: pytest.approx(value) for key, value in locality.items()}
    last = -(3 / 7 * math.log(3 / 7) + 4 / 7 * math.log(4 / 7))
    sharpness = dict(entropy=[last / 4], entropy_if_uniform=math.log(4), negative=[4 / 7 / 4])
    sharpness.update(top_1=[(3 + 4 / 7) / 4], top_9=[1], top_25=[1])
    assert entry['sharpness'] == {key: pytest.approx(value) for key, value in sharpness.items()}
    assert set(entry['rank']) == {'weights', 'weights_with_local', 'output', 'projected'}
    for name, number in (('weights', 2), ('weights_with_local', 4)):
        found = entry['rank'][name]
        assert found['rank'] == found['above_1_percent'] == [number] and found['at_most'] == 4
    assert entry['rank']['weights_with_local']['effective'] == pytest.approx([4])


@pytest.mark.parametrize(
    ('size', 'pairs', 'tokens'),
    [((5, 6), 120 + 28 + 6 + 1, (16, 8, 4, 2)), ((5, 5), 120 + 6 + 6, (16, 4, 4)), ((4, 5), 120 + 6, (16, 4))],
)
def test_confused_pairs_of_windows_of_several_sizes(size, pairs, tokens):
    """All of them, where all queries look alike; of a window of one token there is none."""
    attention, found = WindowAttention(8, 2, 'softmax', (4, 4)).eval(), []
    nn.init.zeros_(attention.qkv.weight)
    with watched(nn.Sequential(attention), lambda block: found.append(inspecting.measure_block(block, ('confusion',)))):
        attention(torch.randn(1, *size, 8))
    confusion = found[0]['confusion']
    assert confusion['pairs_an_image'] == pytest.approx([pairs] * 2) and confusion['share'] == [1, 1]
    norm = sum(number**0.5 for number in tokens) / sum(tokens)  # of n weights alike, 1 / sqrt(n); mean of the queries
    assert confusion['mean_norm'] == pytest.approx([norm] * 2)


def test_stripes_of_two_lengths():
    """A map of 4 x 10: stripes of 8 tokens and of 20. Heads that see different keys are compared on the whole map."""
    block = calls_of(StripeAttention(8, 4, 'softmax', 2).eval(), torch.randn(1, 4, 10, 8))
    whole = inspecting.full_map(block, 40).nan_to_num()
    for number, step in ((40, 1), (10, 4)):
        entry = inspecting.measure_block(block, ('ccs',), number)
        assert entry['ccs'] == pytest.approx(measures.cross_head_similarity(whole[:, ::step]))
    assert (entry['windows'], entry['queries_a_window'], entry['keys_a_window']) == (5 + 2, 20, 20)
    assert entry['heads'] == 4 and entry['map'] == [4, 10]


def test_ranks_of_outputs_before_and_after_the_gate():
    block = calls_of(GlobalAttention(8, 2, 'rala').eval(), torch.randn(1, 4, 5, 8))
    entry = inspecting.measure_block(block, ('rank',))
    for name, features in zip(('output', 'projected'), block.features()[0]):
        assert entry['rank'][name] == {**measures.ranks(features), 'at_most': 4}
    assert entry['rank']['output'] != entry['rank']['projected']


def test_directions_of_stripes_become_one_entry():
    one = dict(sampled_queries=3, error=1.0, share=[1.0], part=dict(rank=[1, 2], at_most=4))
    other = dict(sampled_queries=5, error=2.0, share=[2.0], part=dict(rank=[3], at_most=6))
    assert inspecting._joined([one]) is one
    assert inspecting._joined([dict(a=1.0, b=[1]), dict(b=[2])]) == dict(b=[1, 2])  # what both have
    assert inspecting._joined([one, other]) == dict(
        sampled_queries=8, error=1.5, share=[1, 2], part=dict(rank=[1, 2, 3], at_most=5)
    )
    assert inspecting.averaged([]) == {}
    names = [(dict(block='a', on=True, gone=1, kind='x'), 1), (dict(block='a', on=True, kind='y'), 1)]
    assert inspecting.averaged(names) == dict(block='a', on=True, kind=['x', 'y'])


def test_sizes_of_several_pictures():
    """One where all are alike, else each picture's, also where the first and the last are."""
    merged = runpy.run_path(str(TOOL), run_name='tool')['merged']
    pictures = [[dict(block='a', map=[4, size], key_map=[2, 2], rank=float(size))] for size in (6, 9, 6)]
    (found,) = merged(pictures)
    assert found == dict(block='a', map=[[4, 6], [4, 9], [4, 6]], key_map=[2, 2], rank=7.0)


def test_tokens_outside_of_a_map_and_fewer_of_a_full_one():
    block = calls_of(GlobalAttention(8, 2, 'softmax').eval(), torch.randn(1, 6, 7, 8))
    for row, column in ((6, 0), (0, 7), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=rf'row={row}, column={column} is outside of the map of 0, \(6, 7\)'):
            inspecting.query_map(block, row, column)
    whole, some = inspecting.full_map(block, 42), inspecting.full_map(block, 20)
    assert whole.shape == (2, 42, 42) and some.shape == (2, 14, 14)  # every third: the fewest that are no more
    torch.testing.assert_close(some, whole[:, ::3, ::3])
    assert inspecting.full_map(block).shape == (2, 42, 42)
    # of reduced keys, which are fewer than the queries, all are shown where these are every fourth
    block = calls_of(ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')).eval(), torch.randn(1, 6, 8, 8))
    whole, some = inspecting.full_map(block, 48), inspecting.full_map(block, 12)
    assert whole.shape == (2, 48, 12) and some.shape == (2, 12, 12)
    torch.testing.assert_close(some, whole[:, ::4])
    # windows of which no token is among those that are shown hide none of the others
    block = calls_of(WindowAttention(8, 2, 'softmax', window=(2, 2)).eval(), torch.randn(1, 4, 10, 8))
    whole, some = inspecting.full_map(block, 40), inspecting.full_map(block, 5)
    assert some.isfinite().any(dim=-1).all()  # each query has keys in its window
    torch.testing.assert_close(some, whole[:, ::8, ::8], equal_nan=True)
    block = calls_of(GlobalAttention(8, 2, 'inline').eval(), torch.randn(1, 3, 4, 8))
    whole = block.calls[0].weights(0, torch.arange(12), local=True)
    torch.testing.assert_close(inspecting.full_map(block, 12, local=True), whole)
    assert not torch.allclose(inspecting.full_map(block, 12), whole)


# --- masking ----------------------------------------------------------------------------------------------------------


def test_places_of_tokens():
    """Class tokens have no neighbours, not even each other: as keys they are as far away on the other side."""
    grid = Grid(2, 3, prefix=1)
    places = token_places(grid, 'cpu', 1)
    assert places[1:].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert (places[0] > 10**5).all() and (token_places(grid, 'cpu', -1)[0] < -(10**5)).all()


def test_the_rest_of_the_weights_is_scaled():
    weights = torch.tensor([[[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [-0.25, 0.5, 0.75]]]])
    near = torch.tensor([[True, False, False]] * 3)
    assert masked_weights(weights, near)[0, 0].tolist() == [[0, 0.5, 0.5], [0, 0, 0], pytest.approx([0, 0.4, 0.6])]
    # what is left is next to nothing: its sign stays
    rest = masked_weights(torch.tensor([[[[1.0, -1e-7], [1.0, 1e-7]]]]), torch.tensor([[True, False]] * 2))
    assert rest[0, 0, :, 1].tolist() == pytest.approx([0.1, 0.1])
    # more others than there are: all but the neighbourhood
    others = masked_weights(weights, near, 9, torch.Generator().manual_seed(0))
    assert others[0, 0].tolist() == [[1, 0, 0]] * 3 or others[0, 0, 2].tolist() == pytest.approx([1, 0, 0])
    # of keys that have a weight, image by image, in any head: what padding has cannot be lost
    weights = torch.zeros(2, 2, 1, 12)
    weights[0, 0, 0, [0, 5, 6]], weights[0, 1, 0, [0, 7]], weights[1, :, 0, [0, 3, 4, 8]] = 1, 1, 1
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rest = masked_weights(weights, torch.arange(12)[None] == 0, 2, generator, divide=False)
        assert ((weights != 0) & (rest == 0)).any(dim=1).sum(dim=-1).tolist() == [[2], [2]]
        assert (rest[..., 0] == weights[..., 0]).all()


def test_random_keys_are_those_of_the_seed():
    grid, (q, k, v) = Grid(6, 6), torch.randn(3, 1, 36, 8)
    mixer = get_mixer('softmax')[0](8, 2)

    def out(*seed):
        with masked(mixer, 3, True, *seed):
            return [mixer(q.clone(), k.clone(), v, grid, grid) for _ in range(2)]

    first, again, other = out(0), out(0), out(1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert torch.equal(first[0], out()[0])
    assert not torch.allclose(first[0], other[0]) and not torch.allclose(first[0], first[1])  # anew for each call
    with pytest.raises(RuntimeError, match='left'), masked(mixer, 3):
        raise RuntimeError('left')
    assert not mixer._forward_hooks and not mixer._forward_pre_hooks


def test_maps_are_built_in_parts(monkeypatch):
    """However few weights fit at a time, they are the same."""
    attention, x = GlobalAttention(8, 2, 'inline').eval(), torch.randn(1, 4, 5, 8)

    def found():
        block = calls_of(attention, x)
        with masked(attention, 3):
            return inspecting.full_map(block, 20), attention(x)

    whole = found()
    monkeypatch.setattr(inspecting, 'NUMEL', 3 * 2 * 20)
    monkeypatch.setattr(masking, 'BLOCK_NUMEL', 3 * 2 * 20)
    for one, other in zip(whole, found()):
        torch.testing.assert_close(one, other)
    block = calls_of(attention, x)
    assert [len(rows) for _, _, rows in inspecting.sample(block.branches[0], 10)] == [3]
    monkeypatch.setattr(inspecting, 'NUMEL', 1)
    assert [len(rows) for _, _, rows in inspecting.sample(block.branches[0], 10)] == [2]  # pairs are compared
    torch.testing.assert_close(inspecting.full_map(block, 20), whole[0])


def test_so_many_masked_weights_are_built_at_a_time(monkeypatch):
    """Of all pictures of a batch and all heads."""
    monkeypatch.setattr(masking, 'BLOCK_NUMEL', 3 * 2 * 2 * 20)
    attention, asked = GlobalAttention(8, 2, 'inline').eval(), []
    weights = attention.mixer.weights
    attention.mixer.weights = lambda *args, **more: asked.append(more['rows'].tolist()) or weights(*args, **more)
    with masked(attention, 3):
        attention(torch.randn(2, 4, 5, 8))
    assert [len(rows) for rows in asked] == [3] * 6 + [2] and sum(asked, []) == list(range(20))


def test_neighbourhoods_on_reduced_keys_are_of_cells():
    """4 x 6 queries, keys of 2 x 2 cells: without the cell of the query itself, five are left."""
    attention = ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')).eval()
    x = torch.randn(1, 4, 6, 8)
    block = calls_of(attention, x)
    (call,) = block.calls
    weights = call.mixer.weights(*(call.given[name] for name in ('q', 'k', 'grid', 'key_grid')))
    index = torch.arange(24)
    own = F.one_hot(index // 6 // 2 * 3 + index % 6 // 2, 6).bool()
    values = call.given['v'].unflatten(-1, (2, 4)).transpose(1, 2)
    expected = (masked_weights(weights, own) @ values).transpose(1, 2).flatten(2)
    with masked(attention, 1):
        out = attention(x)
    torch.testing.assert_close(out, attention.proj(expected).view_as(x), rtol=1e-4, atol=1e-5)


class Numbers:
    def __init__(self, number, gone=None):
        if gone:
            raise gone('gone')
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        return dict(inputs=torch.tensor([float(i)]), data_samples=i)


class Guesses(nn.Module):
    """Right about every picture whose number is no multiple of its divisor; what is masked changes that."""

    def __init__(self, variant):
        super().__init__()
        self.variant, self.batches = variant, []

    def test_step(self, batch):
        divisor = {(): 100, ((3, False),): 2, ((3, True),): 5}.get(tuple(self.variant), 3)
        self.batches.append([int(i) for i in batch['data_samples']])
        return [
            SimpleNamespace(pred_label=torch.tensor(i), gt_label=torch.tensor([99, i + (i % divisor == 0)]))
            for i in batch['data_samples']
        ]


def test_accuracies_with_masked_weights(monkeypatch):
    monkeypatch.setitem(DATASETS._module_dict, 'Numbers', Numbers)
    variant, done = [], []

    @contextlib.contextmanager
    def masked(model, window, others):
        variant.append((window, others))
        yield
        variant.pop()

    monkeypatch.setattr(masking, 'masked', masked)
    model, loader = Guesses(variant), dict(dataset=dict(type='Numbers', number=40))
    found = masking_accuracies(model, loader, 20, lambda *args: done.append(args))
    assert found['pictures'] == 20 and list(found['accuracy'].items()) == [
        *(('none', 95), ('3x3', 50), ('9 others', 80)),
        *((name, 65) for name in ('5x5', '25 others', '7x7', '49 others')),
    ]
    assert model.batches[:2] == [list(range(16)), list(range(16, 20))]
    assert done[:3] == [(16, 140), (4, 140), (16, 140)] and sum(n for n, _ in done) == 140
    found = masking_accuracies(model, loader, 50)
    assert found['pictures'] == 40 and found['accuracy']['none'] == 97.5  # all there are
    for kind in (FileNotFoundError, ValueError, KeyError, AssertionError):
        loader['dataset']['gone'] = kind
        with pytest.raises(RunError, match="the test data cannot be read: '?gone'?; --data-root names its folder."):
            masking_accuracies(model, loader, 20)
