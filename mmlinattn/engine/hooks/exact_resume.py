# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import random
from collections.abc import Sequence

import numpy as np
import torch
from mmengine.dist import broadcast, get_rank
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler, DataLoader

from ...utils.errors import RunError

__all__ = ['ExactResumeHook', 'seed_everything']

_STEP, _BATCH = 0, 1  # separate streams for the model and for the data


def seed_everything(*key: int) -> None:
    """Seed Python, NumPy and PyTorch (CPU and CUDA) from a tuple of non-negative integers.

    Any change in any entry gives an unrelated stream.
    """
    words = np.random.SeedSequence(key).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))


class _NumberedBatch(list):
    """Indices of one batch together with the epoch and the place in it where they are drawn."""

    def __init__(self, indices: Sequence[int], epoch: int, number: int):
        super().__init__(indices)
        self.epoch = epoch
        self.number = number

    def __reduce__(self):
        return _NumberedBatch, (list(self), self.epoch, self.number)


class _NumberedBatches:
    """A batch sampler that numbers the batches of another and can start in the middle.

    ``skip`` draws indices only and loads nothing, so that it costs seconds where loading the data
    again costs hours.
    """

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler
        self.epoch = 0
        self._pending = None

    def __getattr__(self, name):  # `sampler`, `batch_size`, `drop_last`, ...
        if name == 'batch_sampler':  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self):
        batches, start = self._pending or (iter(self.batch_sampler), 0)
        self._pending = None
        for number, indices in enumerate(batches, start):
            yield _NumberedBatch(indices, self.epoch, number)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.batch_sampler.sampler, 'set_epoch'):
            self.batch_sampler.sampler.set_epoch(epoch)

    def skip(self, count: int) -> None:
        """Let the next iteration start ``count`` batches on, across epochs where need be."""
        batches, number = iter(self.batch_sampler), 0
        for _ in range(count):
            if next(batches, None) is None:
                self.set_epoch(self.epoch + 1)
                batches, number = iter(self.batch_sampler), 0
                next(batches)
            number += 1
        self._pending = (batches, number)


class _SeededFetch:
    """``dataset.__getitems__``: load the samples of a batch under the seed of that batch."""

    def __init__(self, dataset, seed: int, rank: int):
        self.dataset = dataset
        self.seed = seed
        self.rank = rank

    def __call__(self, indices: Sequence[int]) -> list:
        if isinstance(indices, _NumberedBatch):
            seed_everything(self.seed, self.rank, _BATCH, indices.epoch, indices.number)
        return [self.dataset[index] for index in indices]


class _Batches:
    """What ``IterBasedTrainLoop`` draws from: endless, and already where the run resumes."""

    def __init__(self, loader: DataLoader, num_done: int):
        self.loader = loader
        # The loop draws and drops as many batches as were trained on; they are skipped already.
        self.num_to_drop = num_done
        loader.batch_sampler.skip(num_done)
        self.iterator = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_to_drop > 0:
            self.num_to_drop -= 1
            return None
        batch = next(self.iterator, None)
        if batch is None:
            numbered = self.loader.batch_sampler
            numbered.set_epoch(numbered.epoch + 1)
            self.iterator = iter(self.loader)
            batch = next(self.iterator)
        return batch


def _batches_done(stopped, num_batches: int) -> int:
    """How far into its epoch a checkpoint of ``StopHook`` is, checked against the epochs of this run."""
    values = [stopped.get(key) for key in ('batch', 'num_batches')] if isinstance(stopped, dict) else [None]
    if any(type(value) is not int for value in values) or not 0 <= values[0] <= values[1]:
        raise RunError(f'the checkpoint does not say where in its epoch it was saved: meta.stopped = {stopped!r}.')
    done, saved_num = values
    if done and saved_num != num_batches:
        raise RunError(
            f'the checkpoint was saved after {done} of the {saved_num} batches of an epoch, and here an epoch has '
            f'{num_batches}. Resume with the same data set, batch size and number of processes, or from the checkpoint '
            'of an epoch.'
        )
    return done


@HOOKS.register_module(force=True)
class ExactResumeHook(Hook):
    """Make a resumed run see the data and the random numbers the uninterrupted one sees.

    MMEngine saves the seed, but not how far each generator has run: a resumed run repeats the
    augmentations of the first epoch, draws other drop-path patterns, and, with no seed in the
    config, other orders of the data. Here nothing is carried along, so nothing has to be saved:

    - before each train iteration all generators are seeded from (seed, rank, iteration);
    - each batch is loaded under a seed from (seed, rank, epoch, number in the epoch), whichever
      worker loads it, so that the number of workers does not matter either;
    - samplers are built again with the seed that a resumed run takes over from its checkpoint.

    Runs continue at any iteration that a checkpoint was saved at: iteration-based ones always did, and no longer load
    all the data they had trained on just to drop it; of epoch-based ones MMEngine saves epochs only, and
    :class:`StopHook` what a run was stopped in the middle of. On CPU the losses are equal bit by bit. On a GPU they are
    as equal as two runs of the same program are there (see ``randomness.deterministic`` in MMEngine).

    It needs ``train_dataloader`` as a config; a ready-made ``DataLoader``, and train loops other
    than MMEngine's two, keep MMEngine's behaviour, and the log says so.
    """

    priority = 'VERY_HIGH'

    def __init__(self):
        self.batches = None
        self._meta: dict = {}
        self._num_done = 0  # batches of the first epoch that an earlier run trained on

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Keep where in its epoch it was saved. Only when the run resumes from it, the loop will be there too."""
        self._meta = checkpoint.get('meta') or {}

    def before_train(self, runner) -> None:
        """Put the seeded loader in place; the epoch and iteration to resume at are known by now."""
        if sum(isinstance(hook, ExactResumeHook) for hook in runner.hooks) > 1:
            raise RunError('custom_hooks holds ExactResumeHook twice: each would rebuild what the other has rebuilt.')
        self.seed = self._common_seed(runner)
        self.rank = get_rank()
        loop, config = runner.train_loop, runner._train_dataloader
        known_loop = type(loop) in (EpochBasedTrainLoop, IterBasedTrainLoop)
        if not known_loop or not isinstance(config, dict):
            runner.logger.warning(
                f'ExactResumeHook leaves the data of {type(loop).__name__} alone: a resumed run '
                'will see other augmentations than an uninterrupted one.'
            )
            return
        loop.dataloader = self._rebuild(loop.dataloader, config)
        self.batches = loop.dataloader.batch_sampler
        if isinstance(loop, IterBasedTrainLoop):
            loop.dataloader_iterator = _Batches(loop.dataloader, loop.iter)
        elif self._meta.get('stopped') and (self._meta.get('epoch'), self._meta.get('iter')) == (loop.epoch, loop.iter):
            self._num_done = _batches_done(self._meta['stopped'], len(loop.dataloader))

    def before_train_epoch(self, runner) -> None:
        """Number the batches of this epoch, and leave out those that were trained on before the run was stopped."""
        loop = runner.train_loop
        if self.batches is None or not isinstance(loop, EpochBasedTrainLoop):
            return
        self.batches.set_epoch(runner.epoch)
        if self._num_done:
            self.batches.skip(self._num_done)
            run_iter, num_done = loop.run_iter, self._num_done
            # hooks see the batch's number in the epoch, and the loop counts from 0
            loop.run_iter = lambda index, data_batch: run_iter(index + num_done, data_batch)

    def after_train_epoch(self, runner) -> None:
        """The epochs that follow are whole."""
        if self._num_done:
            self._num_done = 0
            del runner.train_loop.run_iter

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Seed what the model draws in this iteration."""
        seed_everything(self.seed, self.rank, _STEP, runner.iter)

    def _rebuild(self, loader: DataLoader, config: dict) -> DataLoader:
        dataset = loader.dataset
        sampler = DATA_SAMPLERS.build(dict(config['sampler']), default_args=dict(dataset=dataset, seed=self.seed))
        if config.get('batch_sampler') is None:
            batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
        else:
            batch_sampler = DATA_SAMPLERS.build(
                dict(config['batch_sampler']),
                default_args=dict(sampler=sampler, batch_size=config['batch_size']),
            )
        # PyTorch asks the data set for whole batches where it has this method.
        dataset.__getitems__ = _SeededFetch(dataset, self.seed, self.rank)
        return DataLoader(
            dataset,
            batch_sampler=_NumberedBatches(batch_sampler),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    @staticmethod
    def _common_seed(runner) -> int:
        # With `diff_rank_seed` each process has its own; the samplers need one for all.
        seed = torch.tensor(int(runner.seed), dtype=torch.int64)
        broadcast(seed)
        return int(seed)
