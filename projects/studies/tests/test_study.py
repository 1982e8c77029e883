# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a run is trained, and results that survive: of one process, of several, of other studies."""

import json

import pytest
import torch
from filelock import FileLock
from test_arms import RESULTS
from torch import nn

from mmlinattn.utils.errors import RunError
from projects.studies import study, tasks, training
from projects.studies.arms import STUDIES, Arm
from projects.studies.main import main
from projects.studies.report import table
from projects.studies.study import run_study
from projects.studies.tasks import FIRST_TASK, TASKS, Settings

SMALL = Settings(iterations=4, batch=4, num_train=8, num_val=8)


class Toy(tasks.Task):
    """A linear layer for a model; keeps what it is asked for."""

    def __init__(self):
        self.steps, self.weights, self.scale = [], [], 1.0

    def build(self, backbone):
        model = nn.Linear(3, backbone['width'])
        self.weights.append(model.weight[0, 0].item())
        return model

    def mirrored(self, images, targets, which):
        self.steps.append((images.tolist(), targets.tolist(), which.tolist()))
        return images, targets

    def loss(self, model, images, targets):
        return model.weight.sum() * self.scale

    def score(self, model, images, targets, batch=128):
        return 50.0


@pytest.fixture
def toy(monkeypatch):
    task = Toy()
    monkeypatch.setitem(TASKS, 'toy', task)
    monkeypatch.setattr(training, 'attention_measures', lambda model, images: [])
    return task


def train(seed=3, width=2):
    settings = Settings(iterations=10, batch=4, num_train=10, num_val=6, lr=0.01)
    data = torch.arange(settings.num_train), torch.arange(settings.num_train) * 2
    val = torch.arange(100, 106), torch.arange(100, 106)
    return training.train_arm(Arm(dict(width=width)), seed, settings, data, val, task='toy')


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
    toy.scale = float('inf')
    with pytest.raises(RunError, match='seed 3: the loss is .* at step 0'):
        train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('task', 'study_', 'arm', 'least'),
    [
        ('largest', 'inline', 'identity, injective', 60),
        ('recall', 'inline', 'softmax', 60),
    ],
)
def test_tasks_are_learned_by_heart_and_repeat(task, study_, arm, least):
    torch.set_num_threads(1)
    settings = Settings(iterations=60, batch=4, num_train=4, num_val=4, lr=2e-3)
    data = TASKS[task].draw(4, settings, 1)
    arm = STUDIES[study_]().arms[arm]
    found = [training.train_arm(arm, 0, settings, data, data, task=task) for _ in range(2)]
    assert found[0]['accuracy'] > least and found[0]['loss'] == found[1]['loss']
    assert len(found[0]['attention']) == 5


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


@pytest.mark.parametrize(('seconds', 'minutes', 'number'), [(100, 6, 3), (30, 1, 2), (100, 0.1, 1)])
def test_time_is_kept(trained, tmp_path, seconds, minutes, number):
    """By the slowest run so far, the next one would end too late; the first one always runs."""
    trained.seconds, said = seconds, []
    results = run_study('flatten', tmp_path, 3, SMALL, max_minutes=minutes, progress=said.append)
    assert len(results['runs']) == number and f'{24 - number} of 24 runs are left' in said[-1]


def test_two_processes_do_not_share_a_folder(trained, tmp_path):
    with FileLock(tmp_path / 'results.json.lock'), pytest.raises(RunError, match='another process runs a study there'):
        run_study('rala', tmp_path, 1, SMALL)
    assert not trained.runs


def test_runs_of_the_page_are_continued(trained, tmp_path):
    assert len(RESULTS) == 6
    for path in RESULTS:
        (tmp_path / 'results.json').write_text(path.read_text())
        kept = json.loads(path.read_text())
        results = run_study(kept['study'], tmp_path, 1, Settings(), task=kept.get('task', FIRST_TASK))
        assert f'| {results["runs"][0]["arm"]} |' in table(results)
    assert not trained.runs


@pytest.mark.parametrize('text', ['{', '[]', '{"study": "rala"}', json.dumps(dict(study='rala', settings={}, runs=[]))])
def test_results_of_something_else_are_not_overwritten(tmp_path, text):
    (tmp_path / 'results.json').write_text(text)
    with pytest.raises(RunError, match='results.json is (no results file|of study)'):
        run_study('rala', tmp_path, 1, SMALL)
    assert (tmp_path / 'results.json').read_text() == text


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--iterations', 0], '--iterations 0 has to be at least 1'),
        (['--num-train', 4, '--batch', 8], '--num-train 4 has to be at least 8'),
        (['--tinted', 1.1], '--tinted 1.1 has to lie in [0, 1]'),
        (['--task', 'recall', '--tinted', 0], "--tinted 0.0 has no meaning in task 'recall'"),
        (['--device', 'abacus'], '--device abacus'),
    ],
)
def test_bad_arguments(tmp_path, fails, args, message):
    assert message in fails(main, '--study', 'rala', '--out', tmp_path / 'out', *args)
