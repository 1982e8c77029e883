# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a run is trained, and results that survive: of one process, of several, of other studies."""

import json
import math
import subprocess
import sys

import pytest
import torch
from test_arms import RESULTS
from torch import nn

from mmlinattn.attention import GlobalAttention
from mmlinattn.utils.errors import RunError
from projects.studies import study, tasks, training
from projects.studies.arms import STUDIES, Arm
from projects.studies.main import main
from projects.studies.report import table
from projects.studies.study import reusable_runs, reuse, run_study
from projects.studies.tasks import FIRST_TASK, TASKS, Settings

SMALL = Settings(iterations=4, batch=4, num_train=8, num_val=8)


class Toy(tasks.Task):
    """A matrix and a vector for a model; keeps what it is asked for."""

    metric = 'points'

    def __init__(self):
        self.steps, self.scored, self.losses, self.weights = [], 0, iter(()), []

    def build(self, backbone):
        model = nn.Linear(3, backbone['width'])
        self.weights.append(model.weight[0, 0].item())
        return model

    def mirrored(self, images, targets, which):
        self.steps.append((images.tolist(), targets.tolist(), which.tolist()))
        return images, targets

    def loss(self, model, images, targets):
        assert model.training
        total = model.weight.sum() + model.bias.sum()
        return next(self.losses, 1.0) + 1000 * (total - total.detach())  # gradients of 1000

    def score(self, model, images, targets, batch=128):
        assert not model.training
        self.scored += 1
        return 10.0 * self.scored


@pytest.fixture
def toy(monkeypatch):
    task = Toy()
    monkeypatch.setitem(TASKS, 'toy', task)
    monkeypatch.setattr(training, 'attention_measures', lambda model, images: [])
    return task


def train(settings=None, seed=3, width=2, **options):
    settings = settings or Settings(iterations=10, batch=4, num_train=10, num_val=6, lr=0.01)
    data = torch.arange(settings.num_train), torch.arange(settings.num_train) * 2
    val = torch.arange(100, 106), torch.arange(100, 106)
    return training.train_arm(Arm(dict(width=width)), seed, settings, data, val, task='toy', **options)


def test_every_arm_sees_the_same_pictures(toy):
    """All of them before one comes again but for what is left of a batch; half of them mirrored; by the seed alone."""
    train()
    steps, toy.steps = toy.steps, []
    torch.rand(7)
    train(width=5)  # weights of another size take other random numbers
    assert toy.steps == steps and toy.weights[0] == toy.weights[1]
    assert all(targets == [2 * i for i in images] and len(images) == 4 for images, targets, _ in steps)
    assert all(len({*one[0], *two[0]}) == 8 for one, two in zip(steps[::2], steps[1::2]))
    assert 8 < sum(sum(which) for _, _, which in steps) < 32
    toy.steps = []
    train(seed=4)
    assert toy.steps != steps and toy.weights[2] != toy.weights[0]


def test_how_weights_are_changed(toy, monkeypatch):
    """AdamW, matrices decayed by 0.05 and vectors not at all, gradients no longer than 5; rates as settings say."""
    groups, norms, rates, step = [], [], [], torch.optim.AdamW.step

    def watched(self):
        groups.append([(group['weight_decay'], [p.dim() for p in group['params']]) for group in self.param_groups])
        norms.append(math.hypot(*(p.grad.norm().item() for g in self.param_groups for p in g['params'])))
        rates.extend({group['lr'] for group in self.param_groups})
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, 'step', watched)
    train(Settings(iterations=40, batch=2, num_train=4, num_val=2, lr=0.001))
    assert all(group == [(0.05, [2]), (0.0, [1])] for group in groups) and norms == pytest.approx([5] * 40, rel=1e-3)
    assert len(rates) == 40 and rates[:3] == pytest.approx([1e-5, 5e-4, 1e-3])
    assert rates[21] == pytest.approx(5e-4)  # in the middle of what follows the warm-up
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] == pytest.approx(1e-5)


def test_what_is_kept_of_a_run(toy):
    steps = []
    toy.losses = iter(map(float, range(30)))
    settings = Settings(iterations=30, batch=2, num_train=10, num_val=6, lr=0.01)
    found = train(settings, on_step=lambda: steps.append(1))
    assert found['curve'] == [[7, 10], [14, 20], [21, 30], [28, 40]] and found['points'] == 50
    assert found['loss'] == pytest.approx(sum(range(10, 30)) / 20, abs=1e-3)  # of the last twenty steps
    assert found['params'] == 8 and len(steps) == 30 and found['seconds'] > 0 and 'masked' not in found
    toy.losses = iter((1.0, 1.0, math.inf))
    with pytest.raises(RunError, match='seed 3: the loss is inf at step 2'):
        train()


def test_measures_are_means_over_pictures_and_heads():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (GlobalAttention(8, heads, 'inline') for heads in (2, 1))

        def forward(self, x):
            return self.two(self.one(x))

    model, images = Blocks().eval(), torch.randn(3, 4, 5, 8)
    found = training.attention_measures(model, images)
    each = [training.attention_measures(model, image[None]) for image in images]
    assert [(entry['block'], entry['heads']) for entry in found] == [('one', 2), ('two', 1)]
    for i in (0, 1):
        assert {'rank', 'confusion', 'locality', 'sharpness'} < set(found[i])
        for keys in (('rank', 'output', 'effective'), ('locality', 'share')):
            values = [entry[i] for entry in (*each, found)]
            for key in keys:
                values = [value[key] for value in values]
            assert values.pop() == pytest.approx(sum(values) / 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('task', 'study_', 'arm', 'least'),
    [
        ('largest', 'inline', 'identity, injective', 60),
        ('recall', 'inline', 'softmax', 60),
        ('detection', 'rala', 'full', 25),
    ],
)
def test_tasks_are_learned_by_heart_and_repeat(task, study_, arm, least):
    if task == 'detection':
        pytest.importorskip('mmdet')
    torch.set_num_threads(1)
    settings = TASKS[task].settings._replace(iterations=60, batch=4, num_train=4, num_val=4, lr=2e-3)
    data = TASKS[task].draw(4, settings, 1)
    arm = STUDIES[study_]().arms[arm]
    found = [training.train_arm(arm, 0, settings, data, data, task=task) for _ in range(2)]
    assert found[0][TASKS[task].metric] > least and found[0]['loss'] == found[1]['loss']
    assert len(found[0]['attention']) == 5
    assert set(found[0].get('masked', ())) == (
        {'3x3', '9 others', '5x5', '25 others', '7x7', '49 others'} if arm.masks else set()
    )


# --- a study ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """What was trained in place of training, by a clock that nothing else moves."""
    runs = []

    def stand_in(arm, seed, *rest):
        runs.append((arm, seed))
        stand_in.now += stand_in.seconds
        return dict(accuracy=stand_in.accuracy, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=0.0)

    runs_and_clock = stand_in
    stand_in.runs, stand_in.now, stand_in.seconds, stand_in.accuracy = runs, 0.0, 0.0, 50.0
    monkeypatch.setattr(study, 'train_arm', stand_in)
    monkeypatch.setattr(study.time, 'monotonic', lambda: stand_in.now)
    return runs_and_clock


def test_a_study_goes_seed_by_seed_and_on_where_it_was(trained, tmp_path):
    arms, known = ['without CPE', 'full'], STUDIES['rala']().arms
    results = run_study('rala', tmp_path, 2, SMALL, arms=arms, device='cuda:1')
    assert trained.runs == [(known[arm], seed) for seed in (0, 1) for arm in arms]
    assert json.loads((tmp_path / 'results.json').read_text()) == results
    assert (results['study'], results['task'], results['settings']) == ('rala', 'largest', SMALL._asdict())
    assert results['runs'][0]['device'] == 'cuda:1'
    results = run_study('rala', tmp_path, 1, SMALL)  # later, of all arms
    assert [run['arm'] for run in results['runs'][4:]] == [arm for arm in known if arm not in arms]
    assert run_study('rala', tmp_path, 1, SMALL) == results and len(trained.runs) == 10


def test_a_study_that_is_cut_off_keeps_what_it_has(trained, tmp_path, monkeypatch):
    def breaks(*args):
        if len(trained.runs) == 2:
            raise KeyboardInterrupt
        return trained(*args)

    monkeypatch.setattr(study, 'train_arm', breaks)
    with pytest.raises(KeyboardInterrupt):
        run_study('rala', tmp_path, 2, SMALL, arms=['full', 'without CPE'])
    monkeypatch.setattr(study, 'train_arm', trained)
    results = run_study('rala', tmp_path, 2, SMALL, arms=['full', 'without CPE'])
    assert len(trained.runs) == 4 and [run['seed'] for run in results['runs']] == [0, 0, 1, 1]


@pytest.mark.parametrize(('seconds', 'minutes', 'number'), [(100, 6, 3), (30, 1, 2), (100, 0.1, 1)])
def test_time_is_kept(trained, tmp_path, seconds, minutes, number):
    """By the slowest run so far, the next one would end too late; the first one always runs."""
    trained.seconds, said = seconds, []
    results = run_study('flatten', tmp_path, 3, SMALL, max_minutes=minutes, progress=said.append)
    assert len(results['runs']) == number and f'{24 - number} of 24 runs are left' in said[-1]


def test_processes_share_a_study(trained, tmp_path):
    """A run that another process is at is left to it; what it was at is free again when it dies."""
    code = """if True:
        import sys, time
        from pathlib import Path
        from projects.studies.study import _claimed
        with _claimed(Path(sys.argv[1]), 'CHH, IHH', 1) as ours:
            print(ours, flush=True)
            time.sleep(99)
    """
    other = subprocess.Popen([sys.executable, '-c', code, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == 'True\n'
        results = run_study('hallucinated', tmp_path, 2, SMALL)
        assert len(results['runs']) == 21
    finally:
        other.kill()
        other.wait()
    results = run_study('hallucinated', tmp_path, 2, SMALL)
    assert len(results['runs']) == 22 and (results['runs'][-1]['arm'], results['runs'][-1]['seed']) == ('CHH, IHH', 1)


def test_what_another_process_finished_meanwhile_is_kept(trained, tmp_path, monkeypatch):
    def train(*args):  # while the first run is trained, another process does all
        monkeypatch.setattr(study, 'train_arm', trained)
        trained.accuracy = 90.0
        run_study('hallucinated', tmp_path, 1, SMALL, arms=['IHH', 'CHH'])
        trained.accuracy = 10.0
        return trained(*args)

    monkeypatch.setattr(study, 'train_arm', train)
    results = run_study('hallucinated', tmp_path, 1, SMALL, arms=['plain', 'IHH', 'CHH'])
    assert {r['arm']: r['accuracy'] for r in results['runs']} == {'plain': 10.0, 'IHH': 90.0, 'CHH': 90.0}


def test_runs_of_other_studies_are_reused_where_the_model_is_the_same(trained, tmp_path):
    folders = {name: tmp_path / name for name in ('inline', 'attentions', 'hallucinated')}
    for name, folder in folders.items():
        folder.mkdir()
        if name != 'hallucinated':
            trained.accuracy = 40.0 if name == 'attentions' else 30.0
            run_study(name, folder, 1, SMALL)
    added = reuse('hallucinated', folders['hallucinated'], SMALL, [folders['inline'], folders['attentions']])
    assert [(run['arm'], run['seed'], run['accuracy']) for run in added] == [('plain', 0, 30.0), ('IHH, CHH', 0, 40.0)]
    assert reuse('hallucinated', folders['hallucinated'], SMALL, [folders['attentions']]) == []  # first come
    assert len(run_study('hallucinated', folders['hallucinated'], 1, SMALL)['runs']) == 11
    others = json.loads((folders['attentions'] / 'results.json').read_text())
    # an arm that wants the accuracy with masked weights takes no run without it, and another takes it away
    assert reusable_runs('inline', others) == []
    others['runs'] = [dict(run, masked={'3x3': 1}) for run in others['runs']]
    assert {run['arm'] for run in reusable_runs('inline', others)} == {'softmax', 'identity, injective, local residual'}
    assert all('masked' not in run for run in reusable_runs('hallucinated', others))


def test_nothing_is_reused_where_a_folder_is_wrong(trained, tmp_path):
    good, wrong, out = (tmp_path / name for name in ('good', 'wrong', 'out'))
    for folder in (good, wrong, out):
        folder.mkdir()
    run_study('inline', good, 1, SMALL, arms=['softmax'])
    for content, message in ((None, 'has no results.json'), ('[]', 'no results file'), ('{', 'no results file')):
        if content:
            (wrong / 'results.json').write_text(content)
        with pytest.raises(RunError, match=f'wrong.* {message}'):
            reuse('inline', out, SMALL, [good, wrong])
    with pytest.raises(RunError, match='is of study'):
        reuse('inline', out, Settings(), [good])
    assert not (out / 'results.json').exists()


@pytest.mark.parametrize('text', ['{', '[]', '{"study": "rala"}', json.dumps(dict(study='rala', settings={}, runs=[]))])
def test_results_of_something_else_are_not_overwritten(tmp_path, text):
    (tmp_path / 'results.json').write_text(text)
    with pytest.raises(RunError, match='results.json is (no results file|of study)'):
        run_study('rala', tmp_path, 1, SMALL)
    assert (tmp_path / 'results.json').read_text() == text


def test_runs_of_the_page_can_be_reused(tmp_path):
    """With all folders named at once: those of other tasks are passed over."""
    assert len(RESULTS) == 7
    for path in RESULTS:
        out = tmp_path / path.parent.name
        out.mkdir()
        kept = json.loads(path.read_text())
        task = kept.get('task', FIRST_TASK)
        added = reuse(kept['study'], out, TASKS[task].settings, [other.parent for other in RESULTS], task)
        assert {(r['arm'], r['seed']) for r in kept['runs']} <= {(r['arm'], r['seed']) for r in added}
        assert all(TASKS[task].metric in run for run in added)
        assert f'| {added[0]["arm"]} |' in table(json.loads((out / 'results.json').read_text()))


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--reuse', 'nowhere'], "--reuse 'nowhere' has no results.json"),
        (['--arms', 'fulll'], "--arms ['fulll']: study 'rala' has"),
        (['--seeds', 0], '--seeds 0 has to be at least 1'),
        (['--iterations', 0], '--iterations 0 has to be at least 1'),
        (['--batch', 1], '--batch 1 has to be at least 2'),
        (['--size', 63], '--size 63 has to be at least 64'),
        (['--num-val', 3], '--num-val 3 has to be at least 4'),
        (['--num-train', 4, '--batch', 8], '--num-train 4 has to be at least 8'),
        (['--max-minutes', 0], '--max-minutes 0.0 has to be above 0'),
        (['--lr', 0], '--lr 0.0 has to be above 0'),
        (['--tinted', 1.1], '--tinted 1.1 has to lie in [0, 1]'),
        (['--task', 'recall', '--tinted', 0], "--tinted 0.0 has no meaning in task 'recall'"),
        (['--device', 'abacus'], '--device abacus'),
    ],
)
def test_bad_arguments(tmp_path, fails, args, message):
    assert message in fails(main, '--study', 'rala', '--out', tmp_path / 'out', *args)


def test_help_has_the_defaults_of_each_task(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '9999')  # no word is broken
    monkeypatch.setattr(sys, 'argv', ['ablation_study.py', '--help'])
    with pytest.raises(SystemExit):
        main()
    said = ' '.join(capsys.readouterr().out.split())
    for words in (
        '[300 in largest, 400 in detection, 300 in recall]',
        '[0.5 in largest, 0.5 in detection]',
        'rala: RALA Tab. 9 and 10, Fig. 8; inline: InLine Tab. 1-4; flatten: FLatten Tab. 4 and 5; '
        'hallucinated: hMHSA Tab. 2, 3, 5 and 7',
    ):
        assert words in said
