# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a run of a study is trained and measured, what its tasks ask for, and what its arms are."""

import contextlib
import itertools
import json
import math
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from config_helpers import ROOT
from rich.progress import Progress
from torch import nn

from mmlinattn.analysis import ablation, study_tasks
from mmlinattn.analysis.study_tasks import TASKS, Settings
from mmlinattn.attention import GlobalAttention, Grid
from mmlinattn.utils.errors import RunError

# --- one run ----------------------------------------------------------------------------------------------------------


class Toy(study_tasks.Task):
    """A matrix and a vector for a model; keeps what it is asked for."""

    metric = 'points'

    def __init__(self):
        self.steps, self.scored, self.losses, self.built, self.masks = [], [], iter(()), [], []

    def build(self, backbone):
        self.built.append((backbone, torch.rand(1).item()))
        model = nn.Linear(3, 2)
        model.backbone = backbone
        return model

    def mirrored(self, images, targets, which):
        self.steps.append((images.flatten().tolist(), targets.tolist(), which.tolist()))
        return images, targets

    def loss(self, model, images, targets):
        assert model.training
        total = model.weight.sum() + model.bias.sum()
        return next(self.losses, 1.0) + 1000 * (total - total.detach())  # gradients of 1000

    def score(self, model, images, targets, batch=128):
        assert not model.training
        self.scored.append((images, targets, self.masks[:]))
        return 10.0 * len(self.scored)


@pytest.fixture
def toy(monkeypatch):
    task = Toy()
    monkeypatch.setitem(TASKS, 'toy', task)
    monkeypatch.setattr(ablation, 'attention_measures', lambda model, images: [images.tolist()])
    return task


def train(toy, settings=None, seed=3, masks=False, number=10, **options):
    settings = settings or Settings(iterations=10, batch=4, num_train=number, num_val=6, lr=0.01)
    data = torch.arange(number), torch.arange(number) * 2
    val = torch.arange(100, 106), torch.arange(100, 106)
    return ablation.train_arm(
        ablation.Arm({'type': 'toy'}, {}, masks), seed, settings, data, val, task='toy', **options
    )


def test_every_arm_sees_the_same_pictures(toy):
    """All of them before one comes again but for what is left of a batch; half of them mirrored; by the seed alone."""
    train(toy)
    steps, toy.steps = toy.steps, []
    torch.rand(7)  # weights of another size take other random numbers
    train(toy)
    assert toy.steps == steps and toy.built[0] == toy.built[1]
    toy.steps, build = [], toy.build
    toy.build = lambda backbone: torch.rand(7) is None or build(backbone)  # an arm with more weights
    train(toy)
    assert toy.steps == steps and toy.built.pop()[1] != toy.built[0][1]
    toy.build = build
    assert all(targets == [2 * i for i in images] and len(images) == 4 for images, targets, _ in steps)
    for first, second in zip(steps[::2], steps[1::2]):
        assert len({*first[0], *second[0]}) == 8
    assert steps[0][0] != steps[2][0]
    mirrored = [which for _, _, one in steps for which in one]
    assert 8 < sum(mirrored) < 32
    toy.steps = []
    train(toy, seed=4)
    assert toy.steps != steps and toy.built[2][1] != toy.built[0][1]
    toy.steps = []
    train(toy, number=8)  # in which batches fit twice, to the last one
    assert all({*one[0], *two[0]} == set(range(8)) for one, two in zip(toy.steps[::2], toy.steps[1::2]))


def test_what_is_kept_of_a_run(toy):
    steps = []
    toy.losses = iter(map(float, range(30)))
    settings = Settings(iterations=30, batch=2, num_train=10, num_val=6, lr=0.01)
    found = train(toy, settings, on_step=lambda: steps.append(1))
    assert found['curve'] == [[7, 10], [14, 20], [21, 30], [28, 40]] and found['points'] == 50
    assert found['loss'] == pytest.approx(sum(range(10, 30)) / 20, abs=1e-3)  # of the last twenty steps
    assert found['params'] == 8 and found['attention'] == [[100, 101, 102, 103]] and len(steps) == 30
    assert found['seconds'] > 0 and 'masked' not in found and 'accuracy' not in found
    assert all(images.tolist() == targets.tolist() == [*range(100, 106)] for images, targets, _ in toy.scored)
    found = train(toy, settings._replace(iterations=2))
    assert [step for step, _ in found['curve']] == [1, 2] and found['loss'] == pytest.approx(1)


def test_a_loss_that_is_no_number_ends_the_run(toy):
    toy.losses = iter((1.0, 1.0, math.inf))
    with pytest.raises(RunError, match='seed 3: the loss is inf at step 2.'):
        train(toy)


def test_how_weights_are_changed(toy, monkeypatch):
    """AdamW, matrices decayed by 0.05 and vectors not at all, gradients no longer than 5."""
    seen, norms, step = [], [], torch.optim.AdamW.step

    def watched(self):
        seen.append([(group['weight_decay'], [p.dim() for p in group['params']]) for group in self.param_groups])
        norms.append(math.hypot(*(p.grad.norm().item() for g in self.param_groups for p in g['params'])))
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, 'step', watched)
    train(toy)
    assert len(seen) == 10 and seen[0] == [(0.05, [2]), (0.0, [1])]
    assert norms == pytest.approx([5] * 10, rel=1e-3)


def test_each_step_has_the_gradients_of_its_own_pictures(toy, monkeypatch):
    """Which point up and down in turn."""
    signs, seen, step = itertools.cycle((1, -1)), [], torch.optim.AdamW.step
    toy.loss = lambda model, images, targets: next(signs) * (model.weight.sum() + model.bias.sum())
    monkeypatch.setattr(
        torch.optim.AdamW,
        'step',
        lambda self: seen.append(self.param_groups[0]['params'][0].grad[0, 0].item()) or step(self),
    )
    train(toy)
    assert seen == [1, -1] * 5


def test_what_is_masked_of_an_arm(toy, monkeypatch):
    @contextlib.contextmanager
    def masked(model, window, others):
        toy.masks.append((window, others))
        yield
        toy.masks.pop()

    monkeypatch.setattr(ablation, 'masked', masked)
    found = train(toy, masks=True)['masked']
    names = ['3x3', '9 others', '5x5', '25 others', '7x7', '49 others']
    assert list(found) == names and list(found.values()) == [70, 80, 90, 100, 110, 120]
    variants = [(window, others) for window in (3, 5, 7) for others in (False, True)]
    assert [masks for _, _, masks in toy.scored[-7:]] == [[], *([variant] for variant in variants)]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (GlobalAttention(8, heads, 'inline') for heads in (2, 1))

    def forward(self, x):
        return self.two(self.one(x))


def test_measures_are_means_over_pictures_and_heads():
    model, images = Blocks().eval(), torch.randn(3, 4, 5, 8)
    found = ablation.attention_measures(model, images)
    each = [ablation.attention_measures(model, image[None]) for image in images]
    assert [entry['block'] for entry in found] == ['one', 'two'] and [entry['heads'] for entry in found] == [2, 1]
    for i in (0, 1):
        assert {'rank', 'confusion', 'locality', 'sharpness'} < set(found[i]) and 'ccs' not in found[i]
        for key, part in (('rank', 'state'), ('rank', 'output')):
            expected = sum(one[i][key][part]['effective'] for one in each) / 3
            assert found[i][key][part]['effective'] == pytest.approx(expected)
        expected = sum(one[i]['locality']['share'] for one in each) / 3
        assert found[i]['locality']['share'] == pytest.approx(expected)


# --- a study ----------------------------------------------------------------------------------------------------------

SMALL = Settings(iterations=4, batch=4, num_train=8, num_val=8)


@pytest.fixture
def trained(toy, monkeypatch):
    """What was trained in place of training."""
    found = []

    def train(arm, seed, settings, train, val, device, on_step, task):
        found.append((arm, seed, settings, train, val, device, on_step, task))
        return dict(points=40.0 + seed, curve=[], attention=[], params=1, seconds=6.5)

    monkeypatch.setattr(ablation, 'train_arm', train)
    toy.draw = lambda number, settings, seed: ('drawn', number, settings, seed)
    return found


def test_a_study_goes_seed_by_seed(trained, tmp_path):
    said, arms = [], ['without CPE', 'full']
    options = dict(arms=arms, device='cuda:1', progress=said.append, on_step='on_step', task='toy')
    results = ablation.run_study('rala', tmp_path, 2, SMALL, **options)
    study = ablation.STUDIES['rala']().arms
    assert [(arm, seed) for arm, seed, *_ in trained] == [(study[arm], seed) for seed in (0, 1) for arm in arms]
    train, val = ('drawn', 8, SMALL, 1), ('drawn', 8, SMALL, 2)
    assert all(rest == [SMALL, train, val, 'cuda:1', 'on_step', 'toy'] for _, _, *rest in trained)
    assert said == [
        *('[1/4] without CPE, seed 0: 40.0 %  (6 s)', '[2/4] full, seed 0: 40.0 %  (6 s)'),
        *('[3/4] without CPE, seed 1: 41.0 %  (6 s)', '[4/4] full, seed 1: 41.0 %  (6 s)'),
    ]
    kept = json.loads((tmp_path / 'results.json').read_text())
    assert kept == results and (kept['study'], kept['task'], kept['settings']) == ('rala', 'toy', SMALL._asdict())
    more = dict(points=40.0, curve=[], attention=[], params=1, seconds=6.5)
    assert kept['runs'][0] == dict(arm='without CPE', seed=0, device='cuda:1', **more)
    # more seeds later, of all arms
    results = ablation.run_study('rala', tmp_path, 1, SMALL, task='toy')
    assert [(run['arm'], run['seed']) for run in results['runs'][4:]] == [(a, 0) for a in study if a not in arms]
    assert ablation.run_study('rala', tmp_path, 1, SMALL, task='toy') == results and len(trained) == 10


def test_a_study_says_what_is_left(trained, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(ablation.time, 'monotonic', lambda: now.__setitem__(0, now[0] + 30) or now[0])
    said = []
    ablation.run_study('rala', tmp_path, 1, SMALL, max_minutes=1, progress=said.append, task='toy')
    assert len(trained) == 1
    assert said[-1] == '7 of 8 runs are left: under way elsewhere, or for next time (--max-minutes)'


def test_the_slowest_run_says_how_long_the_next_may_take(trained, tmp_path, monkeypatch):
    now, lasts, train = [0.0], iter((100, 10, 10, 10)), ablation.train_arm
    monkeypatch.setattr(ablation.time, 'monotonic', lambda: now[0])

    def slow(*args):
        now[0] += next(lasts)
        return train(*args)

    monkeypatch.setattr(ablation, 'train_arm', slow)
    ablation.run_study('rala', tmp_path, 1, SMALL, max_minutes=3.4, task='toy')  # 204 s, a run of 100 s among them
    assert len(trained) == 2


def test_arms_that_a_study_does_not_have(tmp_path):
    known = list(ablation.STUDIES['rala']().arms)
    with pytest.raises(RunError) as error:
        ablation.run_study('rala', tmp_path, 1, SMALL, arms=['full', 'fulll', 'a'])
    assert str(error.value) == f"--arms ['a', 'fulll']: study 'rala' has {known}."


def test_results_are_added_one_process_at_a_time_and_whole(tmp_path, monkeypatch):
    """Read and written while the others wait, who are told for what; a file that cannot be written stays as it was."""
    held = []

    @contextlib.contextmanager
    def locked(path, work):
        held.append((path, work))
        yield
        held.append(json.loads((tmp_path / 'results.json').read_text())['runs'])

    monkeypatch.setattr(ablation, 'locked', locked)
    run = dict(arm='full', seed=0)
    assert ablation._add('rala', tmp_path, SMALL, [run]) == [run]
    assert held == [(tmp_path / '.locks' / 'results', f'writes {tmp_path / "results.json"}'), [run]]
    before = (tmp_path / 'results.json').read_bytes()

    def broken(fd):
        raise OSError('no space left')

    monkeypatch.setattr('os.fsync', broken)
    with pytest.raises(OSError, match='no space left'):
        ablation._add('rala', tmp_path, SMALL, [dict(arm='full', seed=1)])
    assert (tmp_path / 'results.json').read_bytes() == before


def test_every_run_of_a_study_has_a_claim_of_its_own(tmp_path):
    for name, study in ablation.STUDIES.items():
        runs = [(arm, seed) for arm in study().arms for seed in range(11)]
        assert len({ablation._claim(tmp_path, *run) for run in runs}) == len(runs), name


def results(study='inline', task='largest', settings=SMALL, runs=()):
    return dict(study=study, task=task, settings=settings._asdict(), runs=list(runs))


def test_results_of_another_study_task_or_settings(tmp_path):
    path = tmp_path / 'results.json'
    empty = ablation.load_results(path, 'rala', SMALL, 'recall')
    assert (empty['study'], empty['task'], empty['runs']) == ('rala', 'recall', []) and empty['version']
    assert empty['settings'] == SMALL._asdict()

    def loaded(kept, *wanted):
        path.write_text(json.dumps(kept))
        return ablation.load_results(path, *wanted)

    kept = results()
    assert loaded(kept, 'inline', SMALL) == loaded(kept, None, SMALL) == kept
    old = {key: value for key, value in kept.items() if key != 'task'}  # before there were tasks
    assert loaded(old, 'inline', SMALL) == kept
    other = SMALL._replace(lr=0.5)
    for wanted, words in (
        (('rala', SMALL), "'rala', which needs another --out, task 'largest' with {'iterations': 4"),
        (('inline', SMALL, 'recall'), "'inline', which needs another --out, task 'recall' with"),
        (('inline', other), "'lr': 0.5"),
        ((None, other), "a known study task 'largest' with {'iterations': 4"),
    ):
        with pytest.raises(RunError) as error:
            loaded(kept, *wanted)
        assert str(error.value).startswith(f"{path} is of study 'inline', task 'largest' with {{'iterations': 4")
        assert words in str(error.value).partition('not of')[2]
    for broken in (dict(kept, runs={}), results('unknown')):
        with pytest.raises(RunError, match='results.json is of study'):
            loaded(broken, None if broken['study'] == 'unknown' else 'inline', SMALL)
    for run in (dict(seed=0), dict(arm='softmax'), 1):
        with pytest.raises(RunError, match='results.json is no results file of a study: '):
            loaded(dict(kept, runs=[dict(arm='softmax', seed=0), run]), 'inline', SMALL)


def test_what_is_reused(tmp_path):
    """Measured weights where an arm wants them, and only there; nothing of other tasks, nothing where one is wrong."""
    runs = [dict(arm=arm, seed=seed, masked={'3x3': 1}) for arm in ('softmax', 'relu, linear') for seed in (0, 1)]
    kept = results(runs=[*runs, dict(arm='softmax', seed=2), dict(arm='forgotten', seed=0)])
    softmax = [dict(arm='softmax', seed=seed, masked={'3x3': 1}) for seed in (0, 1)]
    linear = [dict(arm='relu, linear', seed=seed) for seed in (0, 1)]
    assert ablation.reusable_runs('inline', kept) == [*softmax, *linear]
    assert ablation.reusable_runs('hallucinated', kept) == [dict(arm='plain', seed=seed) for seed in (0, 1, 2)]
    folders = [tmp_path / name for name in ('a', 'recall', 'b')]
    for folder, content in zip(folders, (kept, results(task='recall', runs=softmax), results(settings=Settings()))):
        folder.mkdir()
        (folder / 'results.json').write_text(json.dumps(content))
    out = tmp_path / 'out'
    out.mkdir()
    assert len(ablation.reuse('hallucinated', out, SMALL, folders[:2])) == 3
    assert ablation.reuse('hallucinated', out, SMALL, folders[:2]) == []
    twice = tmp_path / 'twice'
    twice.mkdir()
    assert len(ablation.reuse('hallucinated', twice, SMALL, folders[:1] * 2)) == 3
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'results.json').write_text('[]')
    for wrong, message in (
        (folders[2], 'b/results.json is of study'),
        (tmp_path / 'none', "none' has no results.json"),
        (other, 'other/results.json is no results file of a study'),
    ):
        new = tmp_path / f'new {wrong.name}'
        new.mkdir()
        with pytest.raises(RunError, match=message):
            ablation.reuse('hallucinated', new, SMALL, [folders[0], wrong])
        assert not (new / 'results.json').exists()
    for text in ('[]', '{not json'):  # of which task it would be is not known
        (other / 'results.json').write_text(text)
        with pytest.raises(RunError, match='other/results.json is no results file of a study'):
            ablation.reuse('hallucinated', out, SMALL, [other], 'recall')


# --- the tool ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool with what it calls replaced: what that was given."""
    names = runpy.run_path(str(ROOT / 'tools' / 'analysis_tools' / 'ablation_study.py'), run_name='tool')[
        'main'
    ].__globals__
    seen = SimpleNamespace(reused=[], ran=[], written=[], bars=[])

    class Bar(Progress):
        def __init__(self, **options):
            super().__init__(**options)
            seen.bars.append(self)

    def reuse(*args):
        seen.reused.append(args)
        return [dict(arm='full', seed=2, accuracy=41.25, box_AP=3.0)]

    def run_study(*args):
        seen.ran.append(args)
        args[8]()
        args[7]('a message')
        for _ in range(3):
            args[8]()
        return 'results'

    def write(*args):
        seen.written.append(args)
        return [tmp_path / 'table.md']

    monkeypatch.setitem(names, 'Progress', Bar)
    monkeypatch.setattr(ablation, 'reuse', reuse)
    monkeypatch.setattr(ablation, 'run_study', run_study)
    monkeypatch.setitem(names, 'ablation_report', SimpleNamespace(write=write))

    def run(*args):
        monkeypatch.setattr(sys, 'argv', ['ablation_study.py', '--out', str(tmp_path / 'out'), *map(str, args)])
        names['main']()
        return seen

    return run


def test_defaults_of_the_tool(tool, tmp_path, capsys):
    """Those of docs/studies.md."""
    seen = tool('--study', 'rala')
    out = tmp_path / 'out'
    settings = Settings(iterations=300, batch=32, num_train=4096, num_val=512, size=64, lr=0.002, tinted=0.5)
    assert seen.ran[0][:7] == ('rala', out, 3, settings, None, None, 'cpu') and seen.ran[0][9] == 'largest'
    assert seen.reused == [('rala', out, settings, [], 'largest')] and seen.written == [('results', out)]
    said = capsys.readouterr().out.splitlines()
    assert said == ['full, seed 2: 41.2 %  (reused)', 'a message', str(tmp_path / 'table.md')] and out.is_dir()
    (bar,) = seen.bars  # of the steps of one run, anew for each; no terminal here
    assert [(task.completed, task.total) for task in bar.tasks] == [(3, 300)] and bar.disable and bar.console.stderr
    tool('--study', 'rala', '--task', 'detection')
    settings = Settings(iterations=400, batch=16, num_train=2048, num_val=256, size=96, lr=0.001, tinted=0.5)
    assert seen.ran[1][3] == settings and seen.ran[1][9] == 'detection'
    assert capsys.readouterr().out.startswith('full, seed 2: 3.0 %')


def test_the_help_has_the_defaults_of_each_task(tool, monkeypatch, capsys):
    """Of the tasks that have such a setting; and what each study is of."""
    monkeypatch.setenv('COLUMNS', '9999')  # no word is broken
    with pytest.raises(SystemExit) as stop:
        tool('--help')
    said = ' '.join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in (
        'training steps of a run [300 in largest, 400 in detection, 300 in recall]',
        'pictures a step [32 in largest, 16 in detection, 32 in recall]',
        'training pictures [4096 in largest, 2048 in detection, 4096 in recall]',
        'test pictures [512 in largest, 256 in detection, 512 in recall]',
        'side of a picture in pixels, at least 64 [64 in largest, 96 in detection, 64 in recall]',
        'peak learning rate of AdamW [0.002 in largest, 0.001 in detection, 0.002 in recall]',
        'at 1, colours alone would do [0.5 in largest, 0.5 in detection]',
        'what the arms learn [largest]. largest: name the form of the largest of three to five shapes in clutter; '
        'detection: find one to five shapes in clutter, box AP (IoU 0.5 to 0.95); recall: four discs',
        'rala: RALA Tab. 9 and 10, Fig. 8; inline: InLine Tab. 1-4; flatten: FLatten Tab. 4 and 5;',
    ):
        assert words in said


def test_options_of_the_tool(tool, tmp_path):
    settings = Settings(iterations=5, batch=6, num_train=7, num_val=8, size=90, lr=0.1, tinted=1.0)
    options = [f'--{name.replace("_", "-")}={value}' for name, value in settings._asdict().items()]
    more = '--seeds', 4, '--max-minutes', 2.5, '--arms', 'plain', 'CHH, IHH', '--device', 'meta', '--reuse', 'a', 'b'
    out = tmp_path / 'new' / 'deep'
    seen = tool('--study', 'hallucinated', *options, *more, '--out', out)
    assert out.is_dir()
    assert seen.ran[0][:7] == ('hallucinated', out, 4, settings, 2.5, ['plain', 'CHH, IHH'], 'meta')
    assert [str(folder) for folder in seen.reused[0][3]] == ['a', 'b'] and seen.reused[0][2] == settings


@pytest.mark.parametrize(
    ('option', 'least', 'message'),
    [
        ('--iterations', 1, '--iterations 0 has to be at least 1.'),
        ('--batch', 2, '--batch 1 has to be at least 2.'),
        ('--num-train', 32, '--num-train 31 has to be at least 32.'),
        ('--num-val', 4, '--num-val 3 has to be at least 4.'),
        ('--size', 64, '--size 63 has to be at least 64.'),
        ('--seeds', 1, '--seeds 0 has to be at least 1.'),
    ],
)
def test_least_values(tool, capsys, option, least, message):
    assert tool('--study', 'rala', option, least).ran
    with pytest.raises(SystemExit):
        tool('--study', 'rala', option, least - 1)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('option', ['--tinted=-0.1', '--tinted=1.1', '--lr=0', '--lr=-1', '--max-minutes=-1'])
def test_numbers_out_of_their_range(tool, capsys, option):
    with pytest.raises(SystemExit):
        tool('--study', 'rala', option)
    name, _, value = option.partition('=')
    assert capsys.readouterr().err.startswith(f'error: {name} {float(value)} has to ')
    assert tool('--study', 'rala', '--tinted=0').ran


def test_an_out_that_cannot_be_written(tool, tmp_path, capsys):
    (tmp_path / 'out').touch()
    with pytest.raises(SystemExit):
        tool('--study', 'rala')
    assert "out' cannot be written: File exists." in ' '.join(capsys.readouterr().err.split())


# --- arms -------------------------------------------------------------------------------------------------------------

RALA = dict(  # RALA Tab. 9 and 10: ImageNet, COCO box AP, ADE20K
    {
        'full': (dict(mixer='rala'), 82.8, 47.3, 47.9),
        'without KV augmentation': (dict(mixer=dict(type='rala', augment_kv=False)), 82.1, 43.7, 43.6),
        'without output gate': (dict(mixer=dict(type='rala', output_gate=None), mlp_ratio=2.5), 82.5, 46.3, 47.0),
        'without CPE': (dict(cpe=False), 82.7, 47.0, 47.6),
        'gate: identity': (dict(mixer=dict(type='rala', output_gate='identity'), mlp_ratio=2.5), 82.8),
        'gate: tanh': (dict(mixer=dict(type='rala', output_gate='tanh'), mlp_ratio=2.5), 82.7),
        'kernel: relu': (dict(mixer=dict(type='rala', kernel='relu')), 82.8),
        'kernel: softmax': (dict(mixer=dict(type='rala', kernel='softmax')), 82.7),
    }
)


def test_arms_of_rala():
    study = ablation.STUDIES['rala']()
    assert list(study.arms) == list(RALA)
    for name, (what, *printed) in RALA.items():
        arm = study.arms[name]
        assert arm.paper == dict(zip(('ImageNet', 'COCO box AP', 'ADE20K mIoU'), printed)), name
        backbone = dict(arm.backbone)
        assert backbone['type'] == 'RAVLT' and backbone['stage_attns'] == (what.get('mixer', 'rala'),) * 3
        assert backbone.get('cpe', True) == what.get('cpe', True) and not backbone['rotary'] and not arm.masks
        assert backbone['local_kernel'] is None and backbone['arch']['mlp_ratios'] == what.get('mlp_ratio', 2.0)
    worse = ['without KV augmentation', 'without output gate', 'without CPE']
    assert study.pairs == [('full', arm, 'ImageNet') for arm in worse]
    assert study.source == 'RALA Tab. 9 and 10, Fig. 8'


def inline(**options):
    return dict(type='inline', **{'local_residual': False, **options})


def focused(**options):
    return dict(type='focused', **{'local_kernel': None, **options})


def steps(*names):
    return dict(type='hallucinated', steps=names)


PVT = dict(  # attention and what is printed of it
    inline={
        'softmax': ('softmax', {'ImageNet': 72.2}),
        'relu, linear': (inline(kernel='relu', injective=False), {}),
        'relu, injective': (inline(kernel='relu'), {}),
        'exp, linear': (inline(kernel='exp', injective=False), {}),
        'exp, injective': (inline(kernel='exp'), {}),
        'identity, injective': (inline(), {}),
        'identity, injective, local residual': ('inline', {}),
    },
    flatten={
        'relu linear': (focused(focus=False), {}),
        'relu linear, depth-wise': (focused(focus=False, local_kernel=5), {}),
        'focused': (focused(), {}),
        'focused, depth-wise': ('focused', {}),
        **{f'focused, depth-wise, p = {p}': (focused(local_kernel=5, power=p), {}) for p in (2, 4, 8, 32)},
    },
    hallucinated={
        'plain': ('softmax', {'Tiny-ImageNet': 69.3}),
        'copies': (steps(), {'Tiny-ImageNet': 68.8}),
        'IHH': (steps('ihh'), {'Tiny-ImageNet': 69.4}),
        'CHH': (steps('chh'), {'Tiny-ImageNet': 69.2}),
        'IHH, CHH': ('hallucinated', {'Tiny-ImageNet': 69.7}),
        'CHH, IHH': (steps('chh', 'ihh'), {'Tiny-ImageNet': 69.3}),
        'smaller FFN ratio': ('hallucinated', {'Tiny-ImageNet': 68.8}),
        'cFFN, r = 1': ('hallucinated', {'Tiny-ImageNet': 69.1}),
        'cFFN, r = 2': ('hallucinated', {'Tiny-ImageNet': 70.2}),
        'cFFN, r = 3': ('hallucinated', {'Tiny-ImageNet': 70.0}),
        'cFFN of M1, r = 2': ('hallucinated', {'Tiny-ImageNet': 70.0}),
    },
)
FFNS = {
    'cFFN, r = 1': dict(type='compact', r=1),
    'cFFN, r = 2': dict(type='compact'),
    'cFFN, r = 3': dict(type='compact', r=3),
    'cFFN of M1, r = 2': dict(type='compact', matrix='M1'),
}
PAIRS = dict(
    inline=[
        ('softmax', 'softmax, confused', 'ImageNet'),
        ('relu, injective', 'relu, linear', 2.5),
        ('exp, injective', 'exp, linear', None),
        ('identity, injective, local residual', 'identity, injective', None),
    ],
    flatten=[
        ('focused', 'relu linear', None),
        ('relu linear, depth-wise', 'relu linear', None),
        ('focused, depth-wise', 'focused', None),
    ],
    hallucinated=[
        *(('IHH, CHH', arm, 'Tiny-ImageNet') for arm in ('plain', 'copies', 'IHH', 'CHH', 'CHH, IHH')),
        *(
            ('cFFN, r = 2', arm, 'Tiny-ImageNet')
            for arm in ('IHH, CHH', 'smaller FFN ratio', 'cFFN, r = 1', 'cFFN, r = 3', 'cFFN of M1, r = 2')
        ),
    ],
)


@pytest.mark.parametrize('name', PVT)
def test_arms_in_pvt(name):
    study = ablation.STUDIES[name]()
    arms = {key: arm for key, arm in study.arms.items() if key != 'softmax, confused'}
    assert list(arms) == list(PVT[name])
    for key, (mixer, printed) in PVT[name].items():
        backbone = arms[key].backbone
        assert backbone['type'] == 'LinearPVT' and backbone['stage_attns'] == (mixer,) * 2, key
        assert arms[key].paper == printed, key
        arch = backbone['arch']
        assert arch['sr_ratios'] == 1 and arch['drop_path_rate'] == 0 and arch.get('ffn') == FFNS.get(key)
        assert arch['mlp_ratios'] == ((5 / 3, 5 / 3) if key == 'smaller FFN ratio' else (2, 2))
    masks = {key for key, arm in arms.items() if arm.masks}
    wanted = {'softmax', 'identity, injective', 'identity, injective, local residual'}
    assert masks == (wanted if name == 'inline' else set()) and study.pairs == PAIRS[name]


def test_which_tables_the_studies_are_of():
    """Those that docs/studies.md names."""
    assert {name: study().source for name, study in ablation.STUDIES.items()} == dict(
        rala='RALA Tab. 9 and 10, Fig. 8',
        inline='InLine Tab. 1-4',
        flatten='FLatten Tab. 4 and 5',
        hallucinated='hMHSA Tab. 2, 3, 5 and 7',
        attentions='every attention in one host',
    )


def test_every_attention_is_an_arm():
    from mmlinattn.attention import TOKEN_MIXERS

    study = ablation.STUDIES['attentions']()
    assert {name: arm.backbone['stage_attns'] for name, arm in study.arms.items()} == {
        name: (name, name) for name in TOKEN_MIXERS.module_dict
    }
    assert study.pairs == [] and not any(arm.paper or arm.masks for arm in study.arms.values())


def test_confused_softmax():
    """InLine Tab. 1: by head, queries of one direction are one, and what is negative is nothing."""
    arm = ablation.STUDIES['inline']().arms['softmax, confused']
    kind = arm.backbone['stage_attns'][0]['type']
    assert arm.paper == {'ImageNet': 70.6} and not arm.masks
    mixer, grid = kind(8, 2), Grid(1, 5)
    q, k, v = torch.randn(3, 1, 5, 8)
    q[0, 1] = torch.cat((3 * q[0, 0, :4], 0.5 * q[0, 0, 4:]))
    q[0, 2] = -q[0, 2].abs()
    unit = [F.normalize(head.relu(), dim=-1) for head in q.split(4, dim=-1)]
    expected = [(u @ key.mT / 2).softmax(-1) for u, key in zip(unit, k.split(4, dim=-1))]
    weights = mixer.weights(q.clone(), k.clone(), grid, grid)[0]
    torch.testing.assert_close(weights, torch.cat(expected))
    torch.testing.assert_close(weights[:, 0], weights[:, 1])
    torch.testing.assert_close(weights[:, 2], torch.full((2, 5), 0.2))
    out = mixer(q.clone(), k.clone(), v, grid, grid)
    torch.testing.assert_close(out, torch.cat([e @ value for e, value in zip(expected, v.split(4, dim=-1))], dim=-1))


# --- tasks ------------------------------------------------------------------------------------------------------------


class Asked(nn.Module):
    """Gives logits that were prepared, batch by batch; keeps what it was given."""

    def __init__(self, logits):
        super().__init__()
        self.weight, self.logits, self.sizes = nn.Parameter(torch.zeros(1)), logits, []

    def forward(self, images):
        first = sum(self.sizes)
        self.sizes.append(len(images))
        return self.logits[first : first + len(images)]


@pytest.mark.parametrize('name', TASKS)
def test_pictures_are_those_of_the_seed(name):
    """Those to test on are others than those to train on; what else is drawn does not matter."""
    task = TASKS[name]
    images, targets = task.draw(3, task.settings, 1)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, task.settings.size, task.settings.size)
    np.random.rand(3), torch.rand(3)
    again, other = task.draw(3, task.settings, 1), task.draw(3, task.settings, 2)
    assert torch.equal(images, again[0]) and torch.equal(targets, again[1])
    assert all(not torch.equal(one, two) for one in images for two in other[0])
    more = task.draw(4, task.settings, 1)  # and how many there are
    assert torch.equal(images, more[0][:3]) and torch.equal(targets, more[1][:3])


def test_scores_of_classification():
    task = TASKS['largest']
    labels = torch.tensor([0, 1, 2, 3, 4])
    logits = F.one_hot(torch.tensor([0, 1, 5, 3, 0]), 6).float()
    model = Asked(logits)
    assert task.score(model, torch.zeros(5, 3, 8, 8), labels, batch=2) == 60 and model.sizes == [2, 2, 1]
    loss = task.loss(lambda images: logits, None, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, labels, label_smoothing=0.1).item())
    assert task.chance == pytest.approx(100 / 6) and task.num_classes == 6 and task.paper_metric is None


def test_the_largest_is_larger_by_a_third(monkeypatch):
    """Scenes in which it is not are drawn anew; the others are named by it, of three to five shapes."""
    asked, task = [], TASKS['largest']
    sizes = [[10, 13, 4], [10, 12, 4], [50, 13, 4], [7]]
    scenes = iter(sizes * 20)

    def draw_scene(rng, size, num_shapes, diameters, tinted):
        asked.append((size, num_shapes, diameters, tinted))
        masks = np.zeros((len(areas := next(scenes)), 64), bool).reshape(-1, 8, 8)
        for mask, area in zip(masks, areas):
            mask.flat[:area] = True
        return SimpleNamespace(
            image=np.full((*size, 3), areas[0], np.uint8), masks=masks, labels=np.arange(5)[: len(areas)]
        )

    monkeypatch.setattr(study_tasks, 'draw_scene', draw_scene)
    images, labels = task.draw(30, Settings(size=8, tinted=0.25), 0)
    assert labels.tolist() == [1, 0, 0] * 10 and images[:, 0, 0, 0].tolist() == [10, 50, 7] * 10
    assert images.shape == (30, 3, 8, 8) and images.is_contiguous()
    assert {num for _, num, _, _ in asked} == {3, 4, 5}
    assert {(size, diameters, tinted) for size, _, diameters, tinted in asked} == {((8, 8), (0.2, 0.55), 0.25)}


def test_models_see_normalised_pictures():
    images = torch.tensor([0, 127, 255], dtype=torch.uint8)
    expected = [-127.5 / 64, -0.5 / 64, 127.5 / 64]
    assert study_tasks._normalised(images).tolist() == pytest.approx(expected)
    which = torch.tensor([True, False])
    pictures = torch.arange(12).view(2, 1, 2, 3)
    turned, targets = TASKS['largest'].mirrored(pictures, torch.tensor([1, 2]), which)
    assert torch.equal(turned, torch.stack((pictures[0].flip(-1), pictures[1]))) and targets.tolist() == [1, 2]


class Maps(nn.Module):
    """A backbone that gives two maps of what it is given."""

    def forward(self, x):
        self.given = x
        return torch.zeros(len(x), 96, 4, 4), torch.arange(96.0 * 6).view(1, 96, 2, 3).repeat(len(x), 1, 1, 1) / 100


@pytest.mark.parametrize('name', ['largest', 'recall'])
def test_heads_see_the_last_map(name):
    """Its mean where a picture has one label, each place where points have one; of normalised pictures."""
    backbone = ablation.STUDIES['inline']().arms['softmax'].backbone
    model = TASKS[name].build({**backbone, 'out_indices': (0, 1)})  # of 48 and 96 channels
    model.backbone = Maps()
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    out = model(images)
    torch.testing.assert_close(model.backbone.given, (images.float() - 127.5) / 64)
    last = torch.arange(96.0 * 6).view(96, 6) / 100
    weight, bias = model.head.weight.flatten(1), model.head.bias
    if name == 'largest':
        expected = (weight @ last.mean(dim=1) + bias).expand(2, -1)
    else:
        expected = (weight @ last + bias[:, None]).view(1, -1, 2, 3).expand(2, -1, -1, -1)
    torch.testing.assert_close(out, expected)


def test_discs_and_spots(monkeypatch):
    """Eight discs, each a fifth of the picture wide; the first four have a spot half as wide, and the others their
    colours. What is asked for is where the others lie, and the spots' colours, which do not follow from the discs'."""
    drawn, task = [], TASKS['recall']

    def circle(canvas, at, radius, colour, thickness, shift):
        drawn.append((at, radius / 2**shift, tuple(colour)))
        assert thickness == -1 and shift == 4

    monkeypatch.setattr(study_tasks.cv2, 'circle', circle)
    images, targets = task.draw(12, Settings(size=100), 0)
    assert len(drawn) == 12 * 12
    pairs = []
    for i, points in enumerate(targets):
        circles = drawn[12 * i : 12 * (i + 1)]
        with_spot, others = circles[:8], circles[8:]
        assert [radius for _, radius, _ in circles] == [10, 5] * 4 + [10] * 4
        discs, spots = with_spot[::2], with_spot[1::2]
        assert [at for at, *_ in discs] == [at for at, *_ in spots]
        assert [colour for *_, colour in discs] == [colour for *_, colour in others]
        assert [colour for *_, colour in spots] == [task.palette[int(label)] for label in points[:, 2]]
        for ((x, y), *_), point in zip(others, points.tolist()):  # OpenCV's (0, 0) is the middle of the first pixel
            assert (x / 16 + 0.5, y / 16 + 0.5) == pytest.approx(point[:2], abs=1 / 16)
        pairs += [(one[2], other[2]) for one, other in zip(discs, spots)]
    assert len(set(pairs)) > 18  # of 36
    # nothing was drawn: greys that differ by picture, and noise
    greys = images.float().mean(dim=(1, 2, 3))
    assert 89 < greys.min() < 110 < 130 < greys.max() < 150
    assert images.float().std(dim=(1, 2, 3)).tolist() == pytest.approx([12] * 12, abs=0.5)


def test_scores_and_losses_at_points():
    """Maps of 2 x 4 cells of pictures of 16 x 24: 6 pixels wide and 8 high; points on the border are inside."""
    task = TASKS['recall']
    points = torch.tensor([[[5.9, 7.9, 0], [6.0, 8.0, 1], [24.0, 0.0, 2], [0.0, 16.0, 3]]]).repeat(3, 1, 1)
    logits = torch.zeros(3, 6, 2, 4)
    for row, column, label in ((0, 0, 0), (1, 1, 1), (0, 3, 2), (1, 0, 3)):
        logits[:, label, row, column] = 1
    logits[2] = 0
    logits[2, 3] = 1  # one in four right
    model = Asked(logits)
    assert task.score(model, torch.zeros(3, 3, 16, 24), points, batch=2) == 75 and model.sizes == [2, 1]
    loss = task.loss(lambda images: logits[:2], torch.zeros(2, 3, 16, 24), points[:2])
    right = F.cross_entropy(torch.eye(6)[:4], torch.arange(4), label_smoothing=0.1)
    assert loss.item() == pytest.approx(right.item())
    assert task.chance == 25 and task.unused == ('tinted',)


def test_discs_are_apart():
    """And inside of the picture."""
    for number, size, radius in ((8, 64, 6.4), (3, 40, 6.0)):
        rng = np.random.default_rng(0)
        for _ in range(4):
            places = study_tasks._apart(rng, number, size, radius)
            assert places.shape == (number, 2) and places.min() >= radius + 1 and places.max() <= size - radius - 1
            distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + 99 * np.eye(number)
            assert distances.min() > 2 * radius + 1


def test_boxes_of_scenes(monkeypatch):
    """Corners of visible pixels, the right and lower ones beyond the last pixel; no shape, no box."""
    masks = np.zeros((2, 12, 12), bool)
    masks[0, 2:5, 3:9], masks[1, 11, 0] = True, True
    scene = SimpleNamespace(image=np.full((12, 12, 3), 7, np.uint8), masks=masks, labels=np.array([4, 2]))
    asked = []
    monkeypatch.setattr(study_tasks, 'draw_scene', lambda rng, size, **options: asked.append((size, options)) or scene)
    images, targets = TASKS['detection'].draw(2, Settings(size=12, tinted=0.75), 0)
    boxes = [[3, 2, 9, 5, 4], [0, 11, 1, 12, 2]]
    assert targets.tolist() == [boxes + [[-1] * 5] * 3] * 2 and (images == 7).all() and images.shape == (2, 3, 12, 12)
    assert asked == [((12, 12), dict(tinted=0.75))] * 2


def test_what_detectors_are_told():
    """Of each picture its own boxes and labels; losses that it gives are added up, other numbers are not."""
    pytest.importorskip('mmdet')
    task, asked = TASKS['detection'], []
    targets = torch.full((2, 5, 5), -1.0)
    targets[0, 0] = torch.tensor([1.0, 2, 5, 7, 3])
    images = torch.full((2, 3, 16, 24), 255, dtype=torch.uint8)

    class Detector:
        def loss(self, x, samples):
            asked.append((x, samples))
            return dict(
                loss_cls=[torch.tensor(1.0), torch.tensor(2.0)], loss_bbox=[torch.tensor(4.0)], acc=[torch.tensor(8.0)]
            )

    assert task.loss(SimpleNamespace(detector=Detector()), images, targets).item() == 7
    ((x, samples),) = asked
    assert (x == 127.5 / 64).all() and len(samples) == 2
    assert samples[0].gt_instances.bboxes.tolist() == [[1, 2, 5, 7]] and samples[0].gt_instances.labels.tolist() == [3]
    assert samples[1].gt_instances.bboxes.shape == (0, 4)
    for name in ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'):
        assert getattr(samples[0], name) == (16, 24)


@pytest.mark.parametrize(('study', 'arm', 'strides'), [('rala', 'full', (8, 16)), ('flatten', 'focused', (4, 8))])
def test_the_small_detector(study, arm, strides):
    """The last two maps of a backbone, anchors from 20 to 64 pixels, three an octave."""
    pytest.importorskip('mmdet')
    backbone = ablation.STUDIES[study]().arms[arm].backbone
    model = TASKS['detection'].build(backbone)
    head = model.detector.bbox_head
    sides = [(boxes[:, 2] - boxes[:, 0]).tolist() for boxes in head.prior_generator.base_anchors]
    assert sides == [pytest.approx([side * 2 ** (i / 3) for i in range(3)], rel=1e-4) for side in (20, 40)]
    assert [stride[0] for stride in head.prior_generator.strides] == list(strides) and head.num_classes == 6
    last = len(backbone['stage_attns']) - 1
    assert model.detector.backbone.out_indices == (last - 1, last) and backbone['out_indices'] == (last,)
    # RetinaNet's: found from an IoU of 0.5 on, background below 0.4, each box its best anchor
    assigner = head.assigner
    assert (assigner.pos_iou_thr, assigner.neg_iou_thr, assigner.min_pos_iou) == (0.5, 0.4, 0)
    images = torch.randint(256, (1, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        out, same = model.eval()(images), model.detector((images.float() - 127.5) / 64, mode='tensor')
    assert [tuple(map_.shape) for map_ in out[0]] == [(1, 3 * 6, 96 // stride, 96 // stride) for stride in strides]
    for map_, other in zip(out[0] + out[1], same[0] + same[1]):
        torch.testing.assert_close(map_, other)
    test_cfg = model.detector.test_cfg
    assert (test_cfg.score_thr, test_cfg.max_per_img, test_cfg.nms.iou_threshold) == (0.02, 20, 0.5)
    assert (test_cfg.nms_pre, test_cfg.min_bbox_size, test_cfg.nms.type) == (200, 0, 'nms')
    train_cfg = model.detector.train_cfg  # no anchor is left out at the border, none counts more than another
    assert (train_cfg.allowed_border, train_cfg.pos_weight) == (-1, -1)


class Finds(nn.Module):
    """A detector that finds all boxes, or none."""

    def __init__(self, all_of_them):
        super().__init__()
        self.weight, self.all, self.sizes = nn.Parameter(torch.zeros(1)), all_of_them, []
        self.detector = self

    def predict(self, images, samples, rescale):
        assert not rescale and not torch.is_grad_enabled()
        assert images.is_floating_point() and -2 < images.min() < images.max() < 2
        self.sizes.append(len(images))
        for sample in samples:
            truth = sample.gt_instances if self.all else sample.gt_instances[:0]
            scores = torch.ones(len(truth.bboxes))
            sample.pred_instances = type(truth)(bboxes=truth.bboxes, labels=truth.labels, scores=scores)
        return samples


def test_box_ap_of_several_batches_and_of_nothing(capsys, monkeypatch):
    """In silence; the logger is as loud as before."""
    pytest.importorskip('mmdet')
    from mmengine.logging import MMLogger

    task = TASKS['detection']
    images, targets = task.draw(5, task.settings, 0)
    level = MMLogger.get_current_instance().level
    model = Finds(True)
    assert task.score(model, images, targets, batch=2) == pytest.approx(100) and model.sizes == [2, 2, 1]
    assert task.score(Finds(False), images, targets) == 0
    assert MMLogger.get_current_instance().level == level and capsys.readouterr().out == ''
    assert TASKS['recall'].settings == TASKS['largest'].settings == Settings()
    # loud again also where the evaluation fails
    monkeypatch.setattr('mmdet.evaluation.CocoMetric.evaluate', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.score(Finds(True), images, targets)
    assert MMLogger.get_current_instance().level == level


@pytest.mark.parametrize(('batch', 'label'), [(1, 0), (2, 2), (3, 5), (64, 0)])
def test_boxes_are_compared_with_those_of_their_own_picture(batch, label):
    """Two of four are found, and one where another picture has its box: the precision is 1 up to a recall of a quarter,
    2/3 up to a half and 0 beyond, at COCO's 101 points."""
    pytest.importorskip('mmdet')
    task, boxes = (
        TASKS['detection'],
        torch.tensor([[8.0, 8, 40, 40], [48, 8, 80, 40], [8, 48, 40, 80], [48, 48, 80, 80]]),
    )
    targets = torch.full((4, 5, 5), -1.0)
    targets[:, 0, :4], targets[:, 0, 4] = boxes, label
    found = iter([(0, 0.9), (2, 0.8), None, (3, 0.7)])  # of each picture: whose box, and how surely

    class Mixed(Finds):
        def predict(self, images, samples, rescale):
            for sample in samples:
                box, score = next(found) or (0, 0.0)
                kept = slice(0, int(score > 0))
                sample.pred_instances = type(sample.gt_instances)(
                    bboxes=boxes[[box]][kept], labels=torch.tensor([label])[kept], scores=torch.tensor([score])[kept]
                )
            return samples

    images = torch.zeros(4, 3, 96, 96, dtype=torch.uint8)
    assert task.score(Mixed(True), images, targets, batch) == pytest.approx(100 * (26 + 25 * 2 / 3) / 101, abs=0.1)


def test_detection_without_mmdetection_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmdet.utils', None)
    with pytest.raises(RunError, match='detection needs MMDetection: '):
        TASKS['detection'].build(ablation.STUDIES['rala']().arms['full'].backbone)
