# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import random
from functools import partial
from itertools import chain, repeat
from typing import Optional

import numpy as np
import torch
from mmengine.dist import broadcast, get_rank
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from ...utils.building import unwrapped
from ...utils.errors import RunError
from ...utils.private_apis import draw_from, number_from
from ..data.checks import leaf_datasets
from ..data.findings import transforms_of

_STEP, _BATCH = 0, 1  # separate streams for the model and for the data


def seed_everything(*key: int) -> None:
    """Seed Python, NumPy and PyTorch (CPU and CUDA) from a tuple of non-negative integers.

    Any change in any entry gives an unrelated stream.
    """
    words = np.random.SeedSequence(key).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))


class _NumberedBatches:
    """The batches of another batch sampler, each behind its epoch and its place there: ``[(epoch, place), *indices]``.

    Args:
        batch_sampler: Over a sampler; either may have no end.
        is_endless: Whether to begin the next epoch where one ends.
    """

    def __init__(self, batch_sampler, is_endless: bool):
        self.batch_sampler = batch_sampler
        self.sampler, self.batch_size = batch_sampler.sampler, batch_sampler.batch_size  # for MMEngine, which asks
        self.is_endless = is_endless
        self.epoch = 0
        self.num_done = 0  # batches to leave out: indices are drawn and nothing is loaded, seconds in place of hours

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self):
        place = 0
        while place >= 0:  # there were batches
            place = -1
            for place, indices in enumerate(self.batch_sampler):
                if self.num_done > 0:
                    self.num_done -= 1
                else:
                    yield [(self.epoch, place), *indices]
            if not self.is_endless:
                return
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that comes next, to the sampler too."""
        self.epoch = epoch
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(epoch)


def _load(dataset, seed: int, rank: int, batch: list) -> list:
    """``dataset.__getitems__``: load the samples of a numbered batch under the seed of that batch."""
    (epoch, place), *indices = batch
    seed_everything(seed, rank, _BATCH, epoch, place)
    return [dataset[index] for index in indices]


class _Batches(chain):
    """What an iteration-based loop draws from."""

    def skip_iter(self, num_iters: int) -> None:
        """Called by the loop of onedl-mmengine, in place of drawing; these batches are left out already."""


@HOOKS.register_module(force=True)
class ExactResumeHook(Hook):
    """Make a resumed run see the data and the random numbers the uninterrupted one sees.

    MMEngine saves the seed, but not how far each generator has run. Here nothing has to be saved:

    - before each train iteration all generators are seeded from (seed, rank, iteration);
    - each batch is loaded under a seed from (seed, rank, epoch, number in the epoch), whichever
      worker loads it, so that the number of workers does not matter either;
    - samplers begin anew with the seed that a resumed run takes over from its checkpoint.

    Runs continue at any iteration that a checkpoint was saved at; checkpoints in the middle of an epoch
    (``by_epoch=False``, :class:`StopHook`) get its place there as ``stopped``. On CPU the losses are equal bit by bit.
    On a GPU they are as equal as two runs of the same program are there (see ``randomness.deterministic`` in MMEngine).

    It needs ``train_dataloader`` as a config; a ready-made ``DataLoader``, and train loops other
    than MMEngine's two, keep MMEngine's behaviour, and the log says so. Of two of this hook one does the work.

    Raises:
        RunError: A run resumes in the middle of an epoch, and epochs have another number of batches than before.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.batches: Optional[_NumberedBatches] = None
        self._meta: dict = {}
        self._num_done = 0  # batches of the first epoch that an earlier run trained on
        self._place = 0  # batches of this epoch that are trained on

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Keep where in its epoch it was saved. Only when the run resumes from it, the loop will be there too."""
        self._meta = checkpoint.get('meta') or {}

    def before_train(self, runner) -> None:
        """Number and seed the batches; the epoch and iteration to resume at are known by now."""
        # with `diff_rank_seed` each process has its own; the samplers need one for all
        seed = torch.tensor(int(runner.seed), dtype=torch.int64)
        broadcast(seed)
        self.seed, self.rank = int(seed), get_rank()
        loop, config = runner.train_loop, runner._train_dataloader
        given = config if isinstance(config, dict) else {}
        is_made = not isinstance(given.get('sampler'), dict) or not isinstance(given.get('batch_sampler') or {}, dict)
        if type(loop) not in (EpochBasedTrainLoop, IterBasedTrainLoop) or is_made:  # by the user, perhaps without seed
            runner.logger.warning(
                f'ExactResumeHook leaves the data of {type(loop).__name__} alone: a resumed run '
                'will see other augmentations than an uninterrupted one.'
            )
            return
        loader = loop.dataloader
        if isinstance(loader.batch_sampler, _NumberedBatches):
            return
        steps = (step for dataset in leaf_datasets(loader.dataset) for step in transforms_of(dataset))
        # of MMDetection's data preprocessor, which resizes batches
        augments = (getattr(unwrapped(runner.model), 'data_preprocessor', None) or nn.Identity()).modules()
        keeps = {type(step).__name__ for step in steps if hasattr(step, 'results_cache')}
        keeps |= {type(augment).__name__ for augment in augments if hasattr(augment, '_input_size')}
        if runner.iter > 0 and keeps:
            runner.logger.warning(
                f'ExactResumeHook: {", ".join(sorted(keeps))} keeps images or sizes of earlier batches, so that this '
                'resumed run sees others than an uninterrupted one.'
            )
        by_iterations = isinstance(loop, IterBasedTrainLoop)
        self.batches = self._number(loader, config, by_iterations)
        if by_iterations:
            self.batches.num_done = loop.iter
            # MMEngine's loop draws and drops as many batches as were trained on: nothing, as those are left out already
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
            self._num_done = self.batches.num_done = done
            number_from(loop, done)

    def before_train_epoch(self, runner) -> None:
        """Number the batches of this epoch."""
        if self.batches is not None and isinstance(runner.train_loop, EpochBasedTrainLoop):
            self.batches.set_epoch(runner.epoch)

    def after_train_epoch(self, runner) -> None:
        """The epochs that follow are whole."""
        self._place = 0
        if self._num_done:
            self._num_done = 0
            del runner.train_loop.run_iter

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Seed what the model draws in this iteration."""
        seed_everything(self.seed, self.rank, _STEP, runner.iter)
        self._place = batch_idx + 1

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Note the place of a checkpoint that is saved in the middle of an epoch; MMEngine's resume would repeat it."""
        if self.batches is not None and self._place and type(runner.train_loop) is EpochBasedTrainLoop:
            checkpoint['meta']['stopped'] = dict(batch=self._place, num_batches=len(runner.train_dataloader))

    def _number(self, loader: DataLoader, config: dict, is_endless: bool) -> _NumberedBatches:
        """Let a loader draw numbered batches, from the beginning."""
        sampler = DATA_SAMPLERS.build(
            dict(config['sampler']), default_args=dict(dataset=loader.dataset, seed=self.seed)
        )
        of_config = config.get('batch_sampler') or dict(type=BatchSampler, drop_last=loader.drop_last)
        batch_sampler = DATA_SAMPLERS.build(
            dict(of_config), default_args=dict(sampler=sampler, batch_size=config.get('batch_size', 1))
        )
        batches = _NumberedBatches(batch_sampler, is_endless)
        draw_from(loader, batches, partial(_load, loader.dataset, self.seed, self.rank))
        return batches
