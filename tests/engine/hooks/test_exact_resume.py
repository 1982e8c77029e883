# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import multiprocessing
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.engine_toys import At, ToyDataset, interrupt, make_runner, warnings_of
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS
from torch.utils.data import BatchSampler

from mmlinattn.engine import RunError, SafeRunner
from mmlinattn.engine.hooks import exact_resume

HOOKS = [dict(type='ExactResumeHook')]
EPOCHS = dict(by_epoch=True, max_epochs=4)
ITERS = dict(by_epoch=False, max_iters=12)


@DATA_SAMPLERS.register_module(force=True)
class Buckets(BatchSampler):
    """Batches of even and odd indices. The rest of an epoch goes into the next, as in MMDetection's sampler."""

    def __init__(self, sampler, batch_size, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)
        self.buckets = [], []

    def __iter__(self):
        for index in self.sampler:
            bucket = self.buckets[index % 2]
            bucket.append(index)
            if len(bucket) == self.batch_size:
                yield bucket[:]
                del bucket[:]


class Note(Hook):
    """Note data, random numbers and losses of training iterations."""

    priority = 'LOWEST'

    def __init__(self):
        self.places, self.paths, self.data, self.drawn, self.losses = [], [], [], [], {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.places.append(batch_idx)
        self.paths.append([sample.img_path for sample in data_batch['data_samples']])
        self.data.append(float(data_batch['inputs'][0][0]))
        self.drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses[runner.iter] = outputs['loss'].item()


def saved_every(interval):
    """Default hooks of a run with a checkpoint every so many iterations."""
    return dict(checkpoint=dict(type='CheckpointHook', interval=interval, by_epoch=False))


def train(work_dir, train_cfg=EPOCHS, hooks=HOOKS, seed=1, until=None, **kwargs):
    """Train; return the notes of the run and its Runner."""
    if not train_cfg['by_epoch']:
        kwargs.update(default_hooks=saved_every(3))
    kwargs.setdefault('kind', SafeRunner)
    runner = make_runner(work_dir, hooks, train_cfg=dict(train_cfg), randomness=dict(seed=seed), **kwargs)
    note = Note()
    for hook in (note, At(until, interrupt)):
        runner.register_hook(hook)
    with nullcontext() if until is None else pytest.raises(KeyboardInterrupt):
        runner.train()
    for worker in multiprocessing.active_children():  # PyTorch would wait 5 s for each
        worker.terminate()
    return note, runner


INFINITE = dict(sampler=dict(type='InfiniteSampler', shuffle=True))
BUCKETS = dict(batch_sampler=dict(type='Buckets'))


@pytest.mark.parametrize(('seed', 'workers'), [(1, 2), (None, 0)])
@pytest.mark.parametrize(
    'loop, loader, until',
    [(EPOCHS, {}, 7), (ITERS, INFINITE, 7), (ITERS, {}, 8), (ITERS, {**INFINITE, **BUCKETS}, 8)],
    ids=['epochs', 'iterations', 'iterations over a finite sampler', 'batches of the config'],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path, loop, loader, until, seed, workers):
    """Compare with an uninterrupted run, or without a seed the iterations that both parts of the run have."""
    loader = dict(loader, num_workers=workers, persistent_workers=workers > 0)
    first = train(tmp_path / 'cut', loop, seed=seed, until=until, loader=loader)[0].losses
    rest = train(tmp_path / 'cut', loop, seed=seed, loader=loader, resume=True)[0].losses
    assert list(first) == list(range(until)) and list(rest) == list(range(6, 12))
    both = {**first, **rest}
    assert {**rest, **first} == both and len(set(both.values())) == len(both)
    if seed is not None:
        assert both == train(tmp_path / 'whole', loop, seed=seed, loader=loader)[0].losses


def test_neither_workers_nor_a_second_hook_change_the_data(tmp_path):
    """A config may inherit one hook and add another."""
    runs = [train(tmp_path / str(workers), loader=dict(num_workers=workers))[0].losses for workers in (0, 2)]
    assert runs[0] == runs[1] == train(tmp_path / 'twice', hooks=HOOKS * 2)[0].losses


def test_epochs_differ_in_order_and_augmentations(tmp_path):
    """The seed decides; MMEngine's DistSamplerSeedHook no longer reaches the sampler."""
    seen = []
    for seed, cfg in ((1, EPOCHS), (1, ITERS), (2, EPOCHS)):
        note, runner = train(tmp_path / str(len(seen)), cfg, seed=seed)
        assert runner.train_dataloader.batch_size == 4  # read by MMPretrain's PreciseBNHook
        epochs = [tuple(sum(note.paths[i : i + 3], [])) for i in range(0, 12, 3)]
        assert len(set(epochs)) == 4 and len(set(map(frozenset, epochs))) == 1
        # the first sample of each batch before augmentation
        first = [float(Path(paths[0]).stem) / 12 for paths in note.paths]
        assert len({round(value - before, 4) for value, before in zip(note.data, first)}) == 12
        seen.append(epochs)
    assert seen[0] == seen[1] != seen[2]


def test_processes_have_separate_streams(tmp_path, monkeypatch):
    """One seed gives other stochastic depth and augmentations in each process and iteration."""
    runs = []
    for seed, rank in ((11, 0), (11, 1), (11, 1), (12, 1)):
        monkeypatch.setattr(exact_resume, 'broadcast', lambda tensor, seed=seed: tensor.fill_(seed))  # one for all
        monkeypatch.setattr(exact_resume, 'get_rank', lambda rank=rank: rank)
        runs.append(train(tmp_path / str(len(runs)))[0])
    first, second, again, other = runs
    assert second.drawn == again.drawn != other.drawn and second.data == again.data
    assert len({number for run in (first, second) for drawn in run.drawn for number in drawn}) == 2 * 12 * 3
    assert not set(first.data) & set(second.data)


@pytest.mark.parametrize('interval', [2, 3])
def test_checkpoints_by_iterations_of_epochs(tmp_path, interval):
    """Save in the middle of an epoch of three batches, or after its last; the resumed run completes that epoch."""
    options = dict(default_hooks=saved_every(interval), load_from=str(tmp_path / f'whole/iter_{interval}.pth'))
    whole, _ = train(tmp_path / 'whole', default_hooks=options['default_hooks'])
    rest, runner = train(tmp_path / 'cut', resume=True, **options)
    assert [*rest.losses.items()] == [*whole.losses.items()][interval:] and (runner.epoch, runner.iter) == (4, 12)
    assert rest.places == whole.places[interval:]  # of the epoch, as hooks and logs have it
    with pytest.raises(RunError, match=f'after {interval} of the 3 batches of an epoch, and here an epoch has 6'):
        train(tmp_path / 'other', loader=dict(batch_size=2), resume=True, **options)
    assert train(tmp_path / 'new', **options)[0].places == whole.places  # a new run from these weights


def test_models_without_preprocessor_and_samplers_of_the_user(tmp_path):
    data = ToyDataset()
    runner = make_runner(tmp_path, HOOKS, loader=dict(dataset=data, sampler=DefaultSampler(data)))
    runner.model.data_preprocessor = None
    runner.model.train_step = lambda data, optim_wrapper: runner.model(**data)
    assert warnings_of(runner, 'ExactResumeHook leaves the data of EpochBasedTrainLoop alone') and runner.iter == 6
