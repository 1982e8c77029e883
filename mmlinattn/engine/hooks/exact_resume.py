# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, Optional

import numpy as np
import torch
from mmengine.dist import broadcast, get_rank
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import BatchSampler

from ...utils.errors import RunError

_STEP, _BATCH = 0, 1  # separate random streams for the model and for the data
# in the message hub: iteration of the last complete validation; LoggerHook prints keys that begin with val
_VALIDATED = 'last_validation'


def seed_everything(*key: int) -> None:
    """Seed Python, NumPy and PyTorch (CPU and CUDA) from non-negative integers. Each key gives an unrelated stream."""
    words = np.random.SeedSequence(key).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))


class _SeededBatch(list):
    """Indices of the images of a batch, with a seed.

    Iterating over the list seeds all random generators with ``key``, in the process that loads the batch.
    """

    def __init__(self, indices: list, key: tuple):
        super().__init__(indices)
        self.key = key

    def __iter__(self):
        seed_everything(*self.key)
        return super().__iter__()

    def __reduce__(self):  # the default iterates, and would seed the main process
        return type(self), (self[:], self.key)


class _SeededBatches:
    """Wrapper of a batch sampler that yields each list of indices as a :class:`_SeededBatch`. The process that loads a
    batch seeds its generators by ``(*key, epoch, number)``; the batches of an epoch are numbered from 0. If it
    ``is_endless``, it continues with the next epoch at the end of one."""

    def __init__(self, batch_sampler: Any, key: tuple, is_endless: bool):
        self.batch_sampler = batch_sampler
        self.sampler, self.batch_size = batch_sampler.sampler, batch_sampler.batch_size  # read by MMEngine
        self.key, self.is_endless = key, is_endless
        self.epoch = 0
        self.num_done = 0  # batches to skip: indices are drawn, and nothing is loaded

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[_SeededBatch]:
        """Yield the batches from the current epoch on, each a list of image indices, without the first ``num_done``."""
        number = 0
        while number >= 0:  # until an epoch without batches
            number = -1
            for number, indices in enumerate(self.batch_sampler):
                if self.num_done > 0:
                    self.num_done -= 1
                else:
                    yield _SeededBatch(indices, (*self.key, self.epoch, number))
            if not self.is_endless:
                return
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch to start, also in the wrapped sampler."""
        self.epoch = epoch
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)


class _Batches(chain):
    """Iterator over the batches of an iteration-based loop."""

    def skip_iter(self, num_iters: int) -> None:
        """Do nothing: the batch sampler skips batches itself. onedl-mmengine's loop calls this method when resuming."""


_LOOPS = (EpochBasedTrainLoop, IterBasedTrainLoop)


@HOOKS.register_module(force=True)
class ExactResumeHook(Hook):
    """Give a resumed run the same data and random numbers as an uninterrupted run.

    MMEngine saves the seed, but not the state of the random generators. This hook derives the state from the position
    in the training:

    - before each iteration, all generators are seeded from (seed, rank, iteration);
    - each batch is loaded under a seed from (seed, rank, epoch, number in the epoch), in any worker;
    - samplers start with the seed of the resumed checkpoint.

    A run can resume at any saved iteration. Checkpoints within an epoch (``by_epoch=False``, :class:`StopHook`) store
    their position as ``stopped``. On a CPU the losses are bitwise equal. On a GPU they differ as much as those of two
    runs of one program (see ``randomness.deterministic`` in MMEngine).

    Transforms that keep images of earlier batches (MMDetection's ``CachedMosaic``) begin with an empty cache.

    ``train_dataloader`` has to be a config. With a built ``DataLoader`` or sampler, or a train loop other than
    MMEngine's two, the hook warns, and seeds the iterations but not the data.

    Raises:
        RunError: A run resumes within an epoch, and the number of batches in an epoch has changed.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.batches: Optional[_SeededBatches] = None
        self._meta: dict = {}
        self._num_trained = 0  # batches of this epoch

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Keep ``meta`` of the checkpoint; ``before_train`` uses the position in it only if the run resumes."""
        self._meta = checkpoint.get('meta') or {}

    def before_train(self, runner) -> None:
        # with `diff_rank_seed` each process has a seed; samplers need a common one
        seed = torch.tensor(int(runner.seed), dtype=torch.int64)
        broadcast(seed)
        self.seed, self.rank, self._num_trained = int(seed), get_rank(), 0
        if runner.iter == 0:
            runner.message_hub.update_info(_VALIDATED, 0)
        loop, config = runner.train_loop, runner._train_dataloader
        config = config if isinstance(config, dict) else {}
        samplers: list[Any] = [config.get('sampler'), config.get('batch_sampler') or {}]
        if type(loop) not in _LOOPS or not all(isinstance(each, dict) for each in samplers):  # built ones have no seed
            runner.logger.warning(
                f'ExactResumeHook leaves the data of {type(loop).__name__} alone: a resumed run '
                'will see other augmentations than an uninterrupted one.'
            )
            return
        loader, by_iterations = loop.dataloader, isinstance(loop, IterBasedTrainLoop)
        # new samplers, at their beginning
        sampler = DATA_SAMPLERS.build(dict(samplers[0]), default_args=dict(dataset=loader.dataset, seed=self.seed))
        batches = DATA_SAMPLERS.build(
            dict(samplers[1] or dict(type=BatchSampler, drop_last=loader.drop_last)),
            default_args=dict(sampler=sampler, batch_size=config.get('batch_size', 1)),
        )
        self.batches = _SeededBatches(batches, (self.seed, self.rank, _BATCH), by_iterations)
        # PyTorch lets a loader be iterated anew, but not assign its sampler
        vars(loader).update(batch_sampler=self.batches, _iterator=None)
        if by_iterations:
            self.batches.num_done = loop.iter
            # MMEngine's loop draws and drops one batch for each iteration
            num_drawn = 0 if hasattr(loop.dataloader_iterator, 'skip_iter') else loop.iter
            loop.dataloader_iterator = _Batches(repeat(None, num_drawn), loader)
        elif self._meta.get('stopped') and (self._meta['epoch'], self._meta['iter']) == (loop.epoch, loop.iter):
            done, saved_num = (self._meta['stopped'][key] for key in ('batch', 'num_batches'))
            if done and saved_num != len(loader):
                raise RunError(
                    f'the checkpoint was saved after {done} of the {saved_num} batches of an epoch, and here an epoch '
                    f'has {len(loader)}. Resume with the same data set, batch size and number of processes, or from '
                    'the checkpoint of an epoch.'
                )
            self._num_trained = self.batches.num_done = done
            loop.run_iter = partial(self._run_iter, loop)

    def _run_iter(self, loop: EpochBasedTrainLoop, idx: int, data_batch: Any) -> None:
        """Number the batches of a resumed epoch as in an uninterrupted run; MMEngine counts from 0."""
        EpochBasedTrainLoop.run_iter(loop, self._num_trained, data_batch)

    def after_val_epoch(self, runner, metrics=None) -> None:
        """Record the iteration of the validation in the message hub, so that the next checkpoint contains it. The best
        checkpoint is saved after this call. :func:`is_validation_due` reads the record on resuming."""
        runner.message_hub.update_info(_VALIDATED, runner.iter)

    def before_train_epoch(self, runner) -> None:
        if self.batches is not None and isinstance(runner.train_loop, EpochBasedTrainLoop):
            self.batches.set_epoch(runner.epoch)

    def after_train_epoch(self, runner) -> None:
        self._num_trained = 0

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        seed_everything(self.seed, self.rank, _STEP, runner.iter)
        self._num_trained += 1

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Store the position in the epoch; without it, MMEngine would repeat the epoch."""
        if self.batches is not None and self._num_trained and isinstance(runner.train_loop, EpochBasedTrainLoop):
            checkpoint['meta']['stopped'] = dict(batch=self._num_trained, num_batches=len(runner.train_dataloader))


def is_validation_due(runner: Any) -> bool:
    """Return True if the present epoch or iteration has a validation that had not run when the checkpoint was saved."""
    loop, done = runner.train_loop, runner.message_hub.runtime_info.get(_VALIDATED)
    if runner._val_loop is None or not hasattr(loop, 'val_interval') or done in (None, runner.iter):
        return False
    step, total = loop.iter, loop.max_iters
    if isinstance(loop, EpochBasedTrainLoop):
        if loop.iter != loop.epoch * len(loop.dataloader):  # in the middle of an epoch
            return False
        step, total = loop.epoch, loop.max_epochs
    loop._decide_current_val_interval()
    return step >= loop.val_begin and (step % loop.val_interval == 0 or step == total)


def resume_state(runner: Any) -> None:
    """Restore the counter of early stopping from the saved metrics of a resumed run, and run the validation that was
    due when the checkpoint was saved."""
    if runner.iter == 0:
        return
    for hook in runner.hooks:
        history = runner.message_hub.log_scalars.get(f'val/{getattr(hook, "monitor", "")}')
        if isinstance(hook, EarlyStoppingHook) and history is not None and not hook.wait_count:
            for value in history.data[0]:
                ends, reason = hook._check_stop_condition(float(value))
            if len(history.data[0]) and ends:
                runner.train_loop.stop_training = True
                runner.logger.warning(f'{type(hook).__name__} had ended the training: {reason}')
    if is_validation_due(runner):
        runner.logger.info('validating first: the checkpoint was saved before its validation.')
        runner.val_loop.run()
