# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Images of the studies, training of a run, tables, and results of one process, several, and other studies."""

import json

import numpy as np
import pytest
import torch
from filelock import FileLock
from test_variants import RESULTS
from torch import nn

from mmlinattn.utils.errors import RunError
from projects.studies import report, study, training
from projects.studies.arguments import parse_args
from projects.studies.main import main
from projects.studies.study import run_study
from projects.studies.task import Settings, draw
from projects.studies.variants import STUDIES, Variant

SMALL = Settings(iterations=4, batch=4, num_train=8, num_val=8)


class Toy(nn.Linear):
    """Linear classifier of ``width`` classes; it records the first initial weight of each model, and the images."""

    weights: list
    images: list

    def __init__(self, backbone):
        super().__init__(12, backbone['width'])
        self.weights.append(self.weight[0, 0].item())

    def forward(self, images):
        self.images.append(images[:, 0].int().tolist())
        return super().forward(images.flatten(1) * self.scale)


@pytest.fixture
def toy(monkeypatch):
    Toy.weights, Toy.images, Toy.scale = [], [], 1.0
    monkeypatch.setattr(training, 'Classifier', Toy)
    monkeypatch.setattr(training, 'score', lambda model, images, labels: 50.0)
    monkeypatch.setattr(training, 'attention_measures', lambda model, images: [])
    return Toy


def train(seed=3, width=2):
    settings = Settings(iterations=10, batch=4, num_train=10, num_val=6, lr=0.01)
    images = torch.arange(120.0).view(10, 3, 2, 2)  # image i begins with 12 i, mirrored with 12 i + 1
    labels = torch.arange(10) % 2
    return training.train_variant(Variant(dict(width=width)), seed, settings, (images, labels), (images, labels))


def test_every_variant_sees_the_same_pictures(toy):
    """An epoch has each image once, without a partial batch; half of them are mirrored; the seed determines all."""
    train()
    steps, toy.images = toy.images, []
    torch.rand(7)
    train(width=5)  # weights of another size draw other random numbers
    assert toy.images == steps and len(steps) == 10
    seen = [[image[0][0] // 12 for image in step] for step in steps]
    assert all(len({*one, *two}) == 8 for one, two in zip(seen[::2], seen[1::2]))
    mirrored = [image for step in steps for image in step if image[0][0] % 12]
    assert all(row[0] == row[1] + 1 for image in mirrored for row in image) and 8 < len(mirrored) < 32
    toy.images = []
    train(seed=4)
    assert toy.images != steps and toy.weights[0] == toy.weights[1] != toy.weights[2]
    toy.scale = float('inf')
    with pytest.raises(RunError, match='seed 3: the loss is .* at step 0'):
        train()


@pytest.mark.slow
def test_pictures_are_learned_by_heart_and_runs_repeat():
    torch.set_num_threads(1)
    settings = Settings(iterations=60, batch=4, num_train=4, num_val=4, lr=2e-3)
    data, variant = draw(4, settings, 1), STUDIES['inline']().variants['identity, injective']
    found = [training.train_variant(variant, 0, settings, data, data) for _ in range(2)]
    assert found[0]['accuracy'] > 60 and found[0]['loss'] == found[1]['loss']
    assert len(found[0]['attention']) == 5


def test_pictures_are_those_of_the_seed():
    """Independent of other random numbers and of the number of images."""
    images, labels = draw(3, Settings(), 1)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, Settings().size, Settings().size)
    np.random.rand(3), torch.rand(3)
    more, other = draw(4, Settings(), 1), draw(3, Settings(), 2)
    assert torch.equal(images, more[0][:3]) and torch.equal(labels, more[1][:3])
    assert all(not torch.equal(one, two) for one in images for two in other[0])


# --- a study ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch):
    """Replace training by a stub that records (variant, seed) in ``.runs``, and return the stub.

    Each run advances a simulated ``time.monotonic`` by ``.seconds``.
    """
    runs = []

    def stand_in(variant, seed, *rest):
        runs.append((variant, seed))
        stand_in.now += stand_in.seconds
        return dict(accuracy=stand_in.accuracy, curve=[[1, 50.0]], loss=1.0, params=1, attention=[], seconds=0.0)

    runs_and_clock = stand_in
    stand_in.runs, stand_in.now, stand_in.seconds, stand_in.accuracy = runs, 0.0, 0.0, 50.0
    monkeypatch.setattr(study, 'train_variant', stand_in)
    monkeypatch.setattr(study.time, 'monotonic', lambda: stand_in.now)
    return runs_and_clock


def test_a_study_goes_seed_by_seed_and_on_where_it_was(trained, tmp_path):
    variants, known = ['without CPE', 'full'], STUDIES['rala']().variants
    results = run_study('rala', tmp_path, 2, SMALL, variants=variants, device='cuda:1')
    assert trained.runs == [(known[variant], seed) for seed in (0, 1) for variant in variants]
    assert json.loads((tmp_path / 'results.json').read_text()) == results
    assert (results['study'], results['settings']) == ('rala', SMALL._asdict())
    assert results['runs'][0]['device'] == 'cuda:1'
    results = run_study('rala', tmp_path, 1, SMALL)  # later, of all variants
    assert [run['variant'] for run in results['runs'][4:]] == [variant for variant in known if variant not in variants]
    assert run_study('rala', tmp_path, 1, SMALL) == results and len(trained.runs) == 10


@pytest.mark.parametrize(('seconds', 'minutes', 'number'), [(100, 6, 3), (30, 1, 2), (100, 0.1, 1)])
def test_time_is_kept(trained, tmp_path, seconds, minutes, number):
    """The first run always starts; another one only if the slowest so far would fit in the time."""
    trained.seconds, progress = seconds, []
    results = run_study('flatten', tmp_path, 3, SMALL, max_minutes=minutes, progress=progress.append)
    assert len(results['runs']) == number and f'{24 - number} of 24 runs are left' in progress[-1]


def test_two_processes_do_not_share_a_folder(trained, tmp_path):
    with FileLock(tmp_path / 'results.json.lock'), pytest.raises(RunError, match='another process runs a study there'):
        run_study('rala', tmp_path, 1, SMALL)
    assert not trained.runs


def test_runs_of_the_page_are_continued(trained, tmp_path):
    assert len(RESULTS) == 5
    for path in RESULTS:
        (tmp_path / 'results.json').write_text(path.read_text())
        kept = json.loads(path.read_text())
        results = run_study(kept['study'], tmp_path, 1, Settings())
        assert report.table(results) == path.with_name('table.md').read_text(encoding='utf-8')
    assert not trained.runs


@pytest.mark.parametrize('text', ['{', '[]', '{"study": "rala"}', json.dumps(dict(study='rala', settings={}, runs=[]))])
def test_results_of_something_else_are_not_overwritten(tmp_path, text):
    (tmp_path / 'results.json').write_text(text)
    with pytest.raises(RunError, match='results.json: (not a results file|study)'):
        run_study('rala', tmp_path, 1, SMALL)
    assert (tmp_path / 'results.json').read_text() == text


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--iterations', 0], '--iterations=0: expected at least 1'),
        (['--num-train', 4, '--batch', 8], '--num-train=4: expected at least 8'),
        (['--tinted', 1.1], '--tinted=1.1: expected a number from 0 to 1.'),
        (['--device', 'abacus'], "--device='abacus': "),
    ],
)
def test_bad_arguments(tmp_path, fails, args, message):
    assert message in fails(lambda: main(parse_args()), '--study', 'rala', '--out', tmp_path / 'out', *args)


def test_one_seed_has_no_spread():
    assert report.spread([40.0]) == '40.0' and report.spread([40.0, 44.0]) == '42.0 ± 2.8'


@pytest.mark.parametrize(
    ('better', 'worse', 'found'),
    [
        ([3, 4], [1, 2], 'holds'),
        ([1, 2], [3, 4], 'reversed'),
        ([1, 3], [2, 4], 'within the spread'),
        ([3, 4], [2, 3], 'within the spread'),
        ([3], [1, 2], 'one seed'),
        ([3, 4], [1], 'one seed'),
    ],
)
def test_verdicts(better, worse, found):
    assert report.verdict(better, worse) == found
