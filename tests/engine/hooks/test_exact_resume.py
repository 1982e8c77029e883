# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import itertools
import json
import multiprocessing
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_toys import make_runner
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader

from mmlinattn.engine import RunError
from mmlinattn.engine.hooks import exact_resume
from mmlinattn.engine.hooks.exact_resume import (
    ExactResumeHook,
    _Batches,
    _NumberedBatch,
    _NumberedBatches,
    _SeededFetch,
    seed_everything,
)

HOOKS = [dict(type='ExactResumeHook')]
EPOCHS = dict(by_epoch=True, max_epochs=4)
ITERS = dict(by_epoch=False, max_iters=10)


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


SAMPLERS = dict(default='DefaultSampler', infinite='InfiniteSampler')


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('seed', [1, None])
@pytest.mark.parametrize(
    'loop, sampler, until',
    [(EPOCHS, 'default', 7), (ITERS, 'infinite', 7), (ITERS, 'default', 8)],
    ids=['epochs', 'iterations', 'iterations over a finite sampler'],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path, loop, sampler, until, seed, workers):
    """Without a seed in the config, the uninterrupted run is the one that went on to the end."""
    loader = dict(
        num_workers=workers,
        persistent_workers=workers > 0,
        sampler=dict(type=SAMPLERS[sampler], shuffle=True),
    )
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


def test_two_of_the_hook_are_refused(tmp_path):
    """As where a config inherits one and adds one."""
    with pytest.raises(RunError, match='^custom_hooks holds ExactResumeHook twice: '):
        make_runner(tmp_path, [*HOOKS, dict(type='ExactResumeHook')]).train()


def test_upstream_alone_does_not_resume_the_same_losses(tmp_path):
    """If this fails, MMEngine has learnt it and the hook can go."""
    whole = train(tmp_path / 'whole', EPOCHS, hooks=[])
    train(tmp_path / 'cut', EPOCHS, hooks=[], until=7)
    assert train(tmp_path / 'cut', EPOCHS, hooks=[], resume=True) != whole


def test_the_number_of_workers_does_not_change_the_data(tmp_path):
    runs = [train(tmp_path / str(workers), EPOCHS, loader=dict(num_workers=workers)) for workers in (0, 1, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_every_epoch_sees_other_augmentations(tmp_path):
    """One sample in order, no shuffling: only augmentation and dropout can differ."""
    loader = dict(
        dataset=dict(type='ToyDataset', size=1),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=1,
        num_workers=1,
    )
    seen = []

    def note(runner, batch_idx, data_batch=None):
        seen.append(float(data_batch['inputs'][0][0]))

    runner = make_runner(tmp_path, HOOKS, train_cfg=dict(EPOCHS), loader=loader)
    runner.hooks[-1].before_train_iter = note
    runner.train()
    assert len(set(seen)) == 4


@pytest.mark.parametrize('part', ['the step', 'the data'])
def test_processes_draw_numbers_of_their_own(part):
    """Of one seed, alike in each run: other stochastic depth and augmentations on each process."""

    def draw(rank, step):
        if part == 'the data':
            dataset = [None] * 8
            _SeededFetch(dataset, 5, rank)(_NumberedBatch([0], 0, step))
        else:
            hook = ExactResumeHook()
            hook.seed, hook.rank = 5, rank
            hook.before_train_iter(SimpleNamespace(iter=step), 0)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    drawn = {(rank, step): draw(rank, step) for rank in range(3) for step in range(3)}
    for numbers in zip(*drawn.values()):
        assert len(set(numbers)) == 9
    assert drawn == {key: draw(*key) for key in drawn}


@pytest.mark.parametrize('count', [0, 3, 4, 11])
@pytest.mark.parametrize('kind', [DefaultSampler, InfiniteSampler])
def test_skipping_batches_gives_those_that_follow(kind, count):
    def make():
        return _NumberedBatches(BatchSampler(kind(range(12), seed=3), 3, False))

    def endless(batches):
        while True:
            yield from ((batch.epoch, batch.number, list(batch)) for batch in batches)
            batches.set_epoch(batches.epoch + 1)

    expected = list(itertools.islice(endless(make()), count + 6))[count:]
    skipped = make()
    skipped.skip(count)
    assert len(skipped) == 4  # of an epoch, also where the first goes on in the middle
    assert list(itertools.islice(endless(skipped), 6)) == expected


@pytest.mark.parametrize('num_done, given', [(0, []), (2, [None] * 2), (4, [None] * 4)])
def test_a_loop_over_iterations_draws_batches_without_end(num_done, given):
    """Those that it trained on before are drawn as nothing, for it to drop; then come the others, epoch by epoch."""
    loader = DataLoader(range(6), batch_sampler=_NumberedBatches(BatchSampler(range(6), 2, False)), collate_fn=list)
    batches = _Batches(loader, num_done)
    assert iter(batches) is batches
    drawn = list(itertools.islice(batches, 8))
    assert drawn == [*given, *([[0, 1], [2, 3], [4, 5]] * 3)[num_done:8]]
    assert loader.batch_sampler.epoch == 2  # of the eighth


def test_samplers_are_told_of_the_epoch():
    """Each has an order of its own; a run that resumes in the middle of one has that one's."""
    sampler, fresh = (DefaultSampler(range(12), seed=3) for _ in range(2))
    batches = _NumberedBatches(BatchSampler(sampler, 4, False))
    batches.set_epoch(7)
    assert (batches.epoch, sampler.epoch) == (7, 7)
    batches.set_epoch(0)
    batches.skip(5)  # the three of the first epoch, two of the second
    fresh.set_epoch(1)
    *_, last = BatchSampler(fresh, 4, False)
    ((epoch, number, indices),) = [(batch.epoch, batch.number, list(batch)) for batch in batches]
    assert (epoch, number, indices) == (1, 2, last)


def test_numbered_batches_can_be_pickled():
    """As whatever is handed to processes that are spawned."""
    handed_over = pickle.loads(pickle.dumps(_NumberedBatches(BatchSampler(range(6), 3, False))))
    assert [(batch.number, list(batch)) for batch in handed_over] == [(0, [0, 1, 2]), (1, [3, 4, 5])]
    assert handed_over.batch_size == 3
    with pytest.raises(AttributeError, match='no_such_name'):
        _ = handed_over.no_such_name


def test_a_loader_it_cannot_rebuild_is_left_alone(tmp_path):
    runner = make_runner(tmp_path, HOOKS)
    loader = runner.build_dataloader(runner._train_dataloader, seed=0)
    runner._train_dataloader = loader
    runner._train_loop = dict(by_epoch=True, max_epochs=1)
    runner.train()
    assert runner.train_dataloader is loader


def rebuilt(monkeypatch, config, **options):
    """The loader that the hook puts in the place of one with these options."""
    hook = ExactResumeHook()
    hook.seed, hook.rank = 5, 2
    monkeypatch.setattr(exact_resume.DATA_SAMPLERS, 'build', lambda cfg, default_args: (cfg, default_args))
    loader = DataLoader(Listed(range(12)), **options)
    made = []
    monkeypatch.setattr(
        exact_resume, 'BatchSampler', lambda *args: made.append(args) or BatchSampler(range(12), 5, True)
    )
    monkeypatch.setattr(
        exact_resume, '_NumberedBatches', lambda sampler: made.append(sampler) or BatchSampler([], 1, False)
    )
    return loader, hook._rebuild(loader, config), made


class Listed(list):
    """Data that takes attributes."""


def test_the_rebuilt_loader_has_all_settings_of_the_first(monkeypatch):
    options = dict(
        batch_size=5,
        drop_last=True,
        num_workers=2,
        collate_fn=print,
        pin_memory=True,
        timeout=7,
        worker_init_fn=repr,
        multiprocessing_context='spawn',
        prefetch_factor=3,
        persistent_workers=True,
    )
    sampler = dict(type='DefaultSampler', shuffle=True)
    first, second, (built, _) = rebuilt(monkeypatch, dict(sampler=sampler, batch_size=5), **options)
    given = dict(dataset=first.dataset, seed=5)
    assert built == ((sampler, given), 5, True)
    for name in options:
        if name not in ('batch_size', 'drop_last'):  # which the batches have
            assert getattr(second, name) == getattr(first, name), name
    assert second.dataset is first.dataset
    fetch = second.dataset.__getitems__
    assert (fetch.dataset, fetch.seed, fetch.rank) == (first.dataset, 5, 2)


def test_batches_of_the_config_are_sampled_as_it_says(monkeypatch):
    config = dict(sampler=dict(type='DefaultSampler'), batch_sampler=dict(type='Pairs', drop_last=True), batch_size=4)
    first, _, (built,) = rebuilt(monkeypatch, config, batch_size=4)
    sampler = (dict(type='DefaultSampler'), dict(dataset=first.dataset, seed=5))
    assert built == (dict(type='Pairs', drop_last=True), dict(sampler=sampler, batch_size=4))
    assert config['sampler'] == dict(type='DefaultSampler')


def test_all_processes_take_one_seed(monkeypatch):
    monkeypatch.setattr(exact_resume, 'broadcast', lambda tensor: tensor.fill_(11))
    assert ExactResumeHook._common_seed(SimpleNamespace(seed=2**32 - 1)) == 11
    monkeypatch.undo()
    assert ExactResumeHook._common_seed(SimpleNamespace(seed=2**32 - 1)) == 2**32 - 1


def test_a_process_knows_its_rank_and_the_seed_of_all(monkeypatch):
    monkeypatch.setattr(exact_resume, 'get_rank', lambda: 3)
    monkeypatch.setattr(exact_resume, 'broadcast', lambda tensor: tensor.fill_(11))
    hook, logger = ExactResumeHook(), SimpleNamespace(warning=lambda line: None)
    hook.before_train(SimpleNamespace(seed=1, train_loop=None, _train_dataloader={}, logger=logger, hooks=[hook]))
    assert (hook.seed, hook.rank) == (11, 3)


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
    words = np.random.SeedSequence((1, 2)).generate_state(4).tolist()
    assert drawn[1, 2][3] == words[2] * 2**32 + words[3]
    assert drawn[1, 2][0] == random.Random(words[0]).random()
    assert drawn[1, 2][1] == np.random.RandomState(words[1]).random_sample()


def test_other_loops_keep_what_they_have():
    class Other(IterBasedTrainLoop):
        pass

    lines, loop = [], Other.__new__(Other)
    loop.dataloader = 'mine'
    logger = SimpleNamespace(warning=lines.append)
    hook = ExactResumeHook()
    hook.before_train(SimpleNamespace(seed=1, train_loop=loop, _train_dataloader={}, logger=logger, hooks=[hook]))
    assert lines == [
        'ExactResumeHook leaves the data of Other alone: a resumed run will see other augmentations than an '
        'uninterrupted one.'
    ]
    assert loop.dataloader == 'mine' and hook.batches is None
    hook.before_train_epoch(SimpleNamespace(train_loop=loop))


def test_batches_are_numbered_on_after_a_stop(monkeypatch):
    """Hooks see the place in the epoch, up to its end; the loop counts from 0."""
    seen = []
    hook, loop = ExactResumeHook(), exact_resume.EpochBasedTrainLoop.__new__(exact_resume.EpochBasedTrainLoop)
    monkeypatch.setattr(type(loop), 'run_iter', lambda self, index, batch: seen.append((index, batch)))
    hook.batches = _NumberedBatches(BatchSampler(DefaultSampler(range(12), shuffle=False), 3, False))
    hook._num_done = 2
    runner = SimpleNamespace(train_loop=loop, epoch=4)
    hook.before_train_epoch(runner)
    for index, batch in enumerate(hook.batches):
        loop.run_iter(index, (batch.epoch, batch.number, list(batch)))
    hook.after_train_epoch(runner)
    assert seen == [(2, (4, 2, [6, 7, 8])), (3, (4, 3, [9, 10, 11]))]
    runner.epoch = 5
    hook.before_train_epoch(runner)
    loop.run_iter(0, next(iter(hook.batches)).epoch)
    hook.after_train_epoch(runner)
    assert seen[2:] == [(0, 5)]


def test_numbers_travel_to_workers():
    batch = pickle.loads(pickle.dumps(_NumberedBatch([3, 1], 4, 2)))
    assert (type(batch), list(batch), batch.epoch, batch.number) == (_NumberedBatch, [3, 1], 4, 2)
    numbered = _NumberedBatches(BatchSampler(range(10), 4, False))
    assert (len(numbered), numbered.batch_size, numbered.drop_last) == (3, 4, False)
    numbered.set_epoch(3)  # of a sampler that knows of none
    assert numbered.epoch == 3
    copied = pickle.loads(pickle.dumps(numbered))
    assert [list(batch) for batch in copied][-1] == [8, 9]
