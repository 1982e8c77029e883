# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import json
import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from engine_toys import make_runner
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import BatchSampler

from mmlinattn.engine import RunError
from mmlinattn.engine.hooks import exact_resume
from mmlinattn.engine.hooks.exact_resume import seed_everything

HOOKS = [dict(type='ExactResumeHook')]
EPOCHS = dict(by_epoch=True, max_epochs=4)
ITERS = dict(by_epoch=False, max_iters=10)


@DATA_SAMPLERS.register_module(force=True)
class Buckets(BatchSampler):
    """Batches of even and of odd indices, with what is left of an epoch in the next, as MMDetection's by shape."""

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
    """What a training iteration is given and would draw."""

    priority = 'LOWEST'

    def __init__(self):
        self.places, self.data, self.drawn = [], [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.places.append(batch_idx)
        self.data.append(float(data_batch['inputs'][0][0]))
        self.drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))


def losses(work_dir):
    """Loss by iteration, over all the runs logged in a work dir; the later run wins."""
    found = {}
    for log in sorted(work_dir.glob('*/vis_data/scalars.json'), key=lambda p: p.stat().st_mtime):
        for line in log.read_text().splitlines():
            record = json.loads(line)
            if 'loss' in record:
                found[record['step']] = record['loss']
    return found


def train(work_dir, train_cfg, hooks=HOOKS, seed=1, until=None, **kwargs):
    """Train; ``until`` breaks the run off before that iteration as a kill would."""
    interval = dict(checkpoint=dict(type='CheckpointHook', interval=3, by_epoch=False))
    runner = make_runner(
        work_dir,
        hooks,
        train_cfg=dict(train_cfg),
        randomness=dict(seed=seed),
        log_processor=dict(window_size=1, by_epoch=train_cfg['by_epoch']),
        default_hooks={} if train_cfg['by_epoch'] else interval,
        **kwargs,
    )
    if until is not None:
        step = runner.model.train_step

        def train_step(*args, **kwargs):
            if runner.iter == until:
                raise KeyboardInterrupt
            return step(*args, **kwargs)

        runner.model.train_step = train_step
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    else:
        runner.train()
    for worker in multiprocessing.active_children():  # PyTorch would wait 5 s for each
        worker.terminate()
    return losses(work_dir)


INFINITE = dict(sampler=dict(type='InfiniteSampler', shuffle=True))
FINITE = dict(sampler=dict(type='DefaultSampler', shuffle=True))
BUCKETS = dict(batch_sampler=dict(type='Buckets'))


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('seed', [1, None])
@pytest.mark.parametrize(
    'loop, loader, until',
    [(EPOCHS, FINITE, 7), (ITERS, INFINITE, 7), (ITERS, FINITE, 8), (ITERS, {**INFINITE, **BUCKETS}, 8)],
    ids=['epochs', 'iterations', 'iterations over a finite sampler', 'batches of the config'],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path, loop, loader, until, seed, workers):
    """Without a seed in the config, the uninterrupted run is the one that went on to the end."""
    loader = dict(loader, num_workers=workers, persistent_workers=workers > 0)
    first = train(tmp_path / 'cut', loop, seed=seed, until=until, loader=loader)
    assert len(first) == until
    both = train(tmp_path / 'cut', loop, seed=seed, loader=loader, resume=True)
    if seed is None:  # the iterations done twice have to agree
        again = {step: both[step] for step in first}
        assert again == first
        assert len(both) > len(first)
    else:
        assert both == train(tmp_path / 'whole', loop, seed=seed, loader=loader)
    assert len(set(both.values())) == len(both)


def test_upstream_alone_does_not_resume_the_same_losses(tmp_path):
    """If this fails, MMEngine has learnt it and the hook can go."""
    whole = train(tmp_path / 'whole', EPOCHS, hooks=[])
    train(tmp_path / 'cut', EPOCHS, hooks=[], until=7)
    assert train(tmp_path / 'cut', EPOCHS, hooks=[], resume=True) != whole


def test_neither_workers_nor_a_second_hook_change_the_data(tmp_path):
    """As where a config inherits one and adds one."""
    runs = [train(tmp_path / str(workers), EPOCHS, loader=dict(num_workers=workers)) for workers in (0, 1, 2)]
    assert runs[0] == runs[1] == runs[2] == train(tmp_path / 'twice', EPOCHS, hooks=HOOKS * 2)


def noted(folder, **kwargs):
    runner = make_runner(folder, HOOKS, randomness=dict(seed=1), **kwargs)
    note = Note()
    runner.register_hook(note)
    runner.train()
    return note, runner


@pytest.mark.parametrize('train_cfg', [EPOCHS, dict(ITERS, max_iters=4)])
def test_every_epoch_sees_other_augmentations(tmp_path, train_cfg):
    """One sample in order, no shuffling: only augmentation and dropout can differ."""
    loader = dict(
        dataset=dict(type='ToyDataset', size=1),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=1,
        num_workers=1,
    )
    note, _ = noted(tmp_path, train_cfg=train_cfg, loader=loader)
    assert len(set(note.data)) == 4


def test_every_epoch_has_an_order_of_its_own(tmp_path):
    """By the seed; MMEngine's hook for that no longer reaches the sampler."""
    seen = []
    for seed, cfg in ((1, EPOCHS), (1, dict(ITERS, max_iters=12)), (2, EPOCHS)):
        runner = make_runner(tmp_path / str(len(seen)), HOOKS, train_cfg=dict(cfg), randomness=dict(seed=seed))
        order = []
        runner.model.register_forward_pre_hook(
            lambda _, args, kwargs, order=order: order.append([s.img_path for s in kwargs['data_samples']]),
            with_kwargs=True,
        )
        runner.train()
        epochs = [tuple(sum(order[i : i + 3], [])) for i in range(0, 12, 3)]
        assert len(set(epochs)) == 4 and len(set(map(frozenset, epochs))) == 1
        seen.append(epochs)
    assert seen[0] == seen[1] != seen[2]


def test_processes_draw_numbers_of_their_own(tmp_path, monkeypatch):
    """Of one seed: other stochastic depth and augmentations on each process and in each iteration."""
    runs = []
    monkeypatch.setattr(exact_resume, 'broadcast', lambda tensor: tensor.fill_(11))  # processes have one for all
    for rank in (0, 1, 1):
        monkeypatch.setattr(exact_resume, 'get_rank', lambda rank=rank: rank)
        runs.append(noted(tmp_path / str(len(runs)))[0])
    first, second, again = runs
    assert second.drawn == again.drawn and second.data == again.data
    assert len({number for run in (first, second) for drawn in run.drawn for number in drawn}) == 2 * 6 * 3
    assert not set(first.data) & set(second.data)
    monkeypatch.setattr(exact_resume, 'broadcast', lambda tensor: tensor.fill_(12))
    assert noted(tmp_path / 'other')[0].drawn != again.drawn


@pytest.mark.parametrize('train_cfg', [EPOCHS, ITERS])
def test_a_loader_without_batches_ends_the_run(tmp_path, train_cfg):
    loader = dict(drop_last=True, batch_size=50)
    if train_cfg is ITERS:
        with pytest.raises(StopIteration):
            make_runner(tmp_path, HOOKS, train_cfg=dict(train_cfg), loader=loader).train()
    else:
        assert noted(tmp_path, train_cfg=dict(train_cfg), loader=loader)[0].places == []


def test_the_data_set_goes_to_workers_that_are_spawned(tmp_path):
    _, runner = noted(tmp_path)
    dataset = runner.train_dataloader.dataset
    sent = pickle.loads(pickle.dumps(dataset))
    batch = [(3, 2), 5, 7]
    first, again = ([sample['inputs'] for sample in data.__getitems__(batch)] for data in (dataset, sent))
    assert torch.equal(torch.stack(first), torch.stack(again))
    others = ([(3, 1), 5, 7], [(2, 2), 5, 7])
    assert all(not torch.equal(sent.__getitems__(other)[0]['inputs'], again[0]) for other in others)


class OtherLoop(IterBasedTrainLoop):
    """A loop whose batches are its own business."""


@pytest.mark.parametrize('is_ready_made', [True, False])
def test_a_loader_it_does_not_know_is_left_alone(tmp_path, is_ready_made):
    runner = make_runner(tmp_path, HOOKS, train_cfg=dict(type=OtherLoop, max_iters=3))
    if is_ready_made:
        runner._train_dataloader = runner.build_dataloader(runner._train_dataloader, seed=0)
        runner._train_loop = dict(by_epoch=True, max_epochs=1)
    lines = []
    runner.logger.warning = lines.append
    runner.train()
    name = 'EpochBasedTrainLoop' if is_ready_made else 'OtherLoop'
    assert any(f'leaves the data of {name} alone' in line for line in lines)
    assert type(runner.train_dataloader.batch_sampler) is BatchSampler and runner.iter == 3


def test_the_middle_of_an_epoch_needs_the_same_batches(tmp_path):
    make_runner(tmp_path, HOOKS).train()
    checkpoint = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)
    checkpoint['meta'].update(epoch=1, iter=5, stopped=dict(batch=2, num_batches=3))
    torch.save(checkpoint, tmp_path / 'stopped.pth')
    options = dict(resume=True, load_from=str(tmp_path / 'stopped.pth'))
    note, runner = noted(tmp_path / 'same', **options)
    assert note.places == [2] and runner.iter == 6  # of the epoch, as hooks and logs have it
    note, _ = noted(tmp_path / 'more', train_cfg=dict(by_epoch=True, max_epochs=3), **options)
    assert note.places == [2, 0, 1, 2]
    with pytest.raises(RunError, match='after 2 of the 3 batches of an epoch, and here an epoch has 6'):
        noted(tmp_path / 'other', loader=dict(batch_size=2), **options)
    options['resume'] = False  # a new run from these weights
    assert noted(tmp_path / 'new', **options)[0].places == [0, 1, 2] * 2


def test_every_generator_has_a_stream_of_its_own():
    """By all entries of the key; PyTorch's seed is one of 64 bits."""

    def draw(*key):
        seed_everything(*key)
        return random.random(), float(np.random.random()), float(torch.rand(())), torch.initial_seed()

    keys = [(1, 2), (2, 1), (1, 2, 0, 1), (1, 3), (2**32 - 1, 2)]
    drawn = {key: draw(*key) for key in keys}
    assert drawn == {key: draw(*key) for key in keys}
    for numbers in zip(*drawn.values()):
        assert len(set(numbers)) == len(keys)
    assert min(numbers[3] for numbers in drawn.values()) > 2**32
