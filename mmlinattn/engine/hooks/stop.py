# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import atexit
import ctypes
import functools
import os
import signal
import sys
import threading
from typing import Any

import torch
from mmengine.dist import all_reduce, barrier, get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from .checkpointing import ATOMIC_BACKEND, write_checkpoint
from .exact_resume import ExactResumeHook

CHECKPOINT_NAME = 'stopped.pth'  # overwritten by the next stop; not counted by max_keep_ckpts
TERMINATED = 128 + signal.SIGTERM  # exit status, as shells count
GRACE = 30  # seconds that workers live after a SIGTERM, like the delay of Slurm and torchrun before SIGKILL


class _Shielded:
    """``worker_init_fn`` of a DataLoader that ignores Ctrl-C and delays SIGTERM in the worker, then calls ``init_fn``.

    A terminal sends Ctrl-C, and Slurm sends SIGTERM, to all processes of a run. The main process needs its workers for
    the rest of the iteration, and ends them itself.
    """

    def __init__(self, init_fn):
        self.init_fn = init_fn
        self.main_ends = torch.zeros(1, dtype=torch.bool).share_memory_()
        atexit.register(self.main_ends.fill_, True)  # runs before multiprocessing terminates the workers

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if sys.platform == 'linux':
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans after a kill -9
        sys.excepthook = _excepthook
        if self.init_fn is not None:
            self.init_fn(worker_id)

    def _on_sigterm(self, signum, frame) -> None:
        if self.main_ends.item():
            os._exit(0)  # as PyTorch's own handler
        signal.alarm(GRACE)


def _excepthook(kind, error, traceback) -> None:
    """Silence connection errors of a worker's memory-sharing thread after Ctrl-C in the main process."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


def shield_workers(loader: DataLoader) -> None:
    """Let workers that ``loader`` starts from now on survive a SIGTERM for :data:`GRACE` seconds."""
    if getattr(loader, 'num_workers', 0) > 0 and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


_forking = threading.local()  # mask: signals blocked by a thread before it forks


@functools.cache
def _reset_in_children() -> None:
    """Restore the default SIGTERM handler in processes forked while a StopHook handles the signal.

    Process pools (of metrics, for example) end their processes by SIGTERM, and would wait forever if these ignored it.
    The signal is blocked during the fork, as Python loses a signal that arrives while the child is set up.
    """

    def before() -> None:
        listens = isinstance(getattr(signal.getsignal(signal.SIGTERM), '__self__', None), StopHook)
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]) if listens else None

    def after(is_child: bool) -> None:
        if _forking.mask is not None:
            if is_child:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)

    os.register_at_fork(before=before, after_in_parent=lambda: after(False), after_in_child=lambda: after(True))


@HOOKS.register_module(force=True)
class StopHook(Hook):
    """Save a checkpoint and exit with status 143 on SIGTERM (sent by Slurm, Kubernetes, torchrun).

    - In training, the current iteration is finished, or with gradient accumulation all iterations up to the next update
      of the weights. Then ``stopped.pth`` is written beside the other checkpoints, and named in ``last_checkpoint``.
      ``--resume`` continues from it, even in the middle of an epoch (:class:`ExactResumeHook`).
    - In a validation, the checkpoint is saved at once, and the rest of the validation is skipped.
    - Epoch-based runs without :class:`ExactResumeHook`, and loops other than MMEngine's two, exit without saving.

    Args:
        save_on_sigterm (bool): Handle SIGTERM. If False, SIGTERM ends the run at once.
        interval (int): Number of iterations after which processes tell each other about received signals.

    Raises:
        ValueError: ``interval`` is not a positive integer.
    """

    priority = 'LOWEST'  # after the hooks of checkpoints and learning rates

    def __init__(self, save_on_sigterm: bool = True, interval: int = 10):
        if type(interval) is not int or interval < 1:
            raise ValueError(f'StopHook: interval={interval!r}: expected a positive integer')
        self.save_on_sigterm = save_on_sigterm
        self.interval = interval
        self.is_signalled = False  # this process got the signal
        self._all_signalled = False  # all processes know of it
        self._previous: Any = None  # the previous handler

    def before_run(self, runner) -> None:
        for loop in (runner._train_loop, runner._val_loop):
            loader = getattr(loop, 'dataloader', None)
            if isinstance(loader, DataLoader):
                shield_workers(loader)

    def before_train(self, runner) -> None:
        if not self.save_on_sigterm or threading.current_thread() is not threading.main_thread():
            return
        found = signal.getsignal(signal.SIGTERM)
        other = getattr(found, '__self__', None)
        if isinstance(other, StopHook) and other not in runner.hooks:  # left by a training that ended in an error
            found = other._previous
        if found in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = found
            _reset_in_children()
            signal.signal(signal.SIGTERM, self._on_sigterm)
        elif not isinstance(other, StopHook):  # a config and its base may each have one
            runner.logger.warning('StopHook: SIGTERM has a handler already, which stays: no checkpoint is saved.')

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if self._previous is None:
            return
        if get_world_size() == 1:
            self._all_signalled = self.is_signalled
        elif not self._all_signalled and (runner.iter + 1) % self.interval == 0:
            any_signalled = torch.tensor([float(self.is_signalled)])
            all_reduce(any_signalled, op='max')
            self._all_signalled = bool(any_signalled.item())
        should_update = getattr(runner.optim_wrapper, 'should_update', None)  # not in gradient accumulation
        if self._all_signalled and (should_update is None or should_update()):  # DeepSpeed's has none
            self._save_and_end(runner, runner.iter + 1)

    def before_val_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Save and exit at once: a validation does not change weights."""
        if self._previous is None or not self.is_signalled:
            return
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):  # swap the averaged weights of the validation back
                EMAHook.after_val_epoch(hook, runner)  # MMPretrain's would validate once more
        self._save_and_end(runner, runner.iter, waits=False)

    def after_train(self, runner) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_sigterm(self, signum, frame) -> None:
        self.is_signalled = True

    def _save_and_end(self, runner, iteration: int, waits: bool = True) -> None:
        has_position = any(isinstance(hook, ExactResumeHook) and hook.batches is not None for hook in runner.hooks)
        if has_position or type(runner.train_loop) is IterBasedTrainLoop:
            path = self._save(runner, dict(epoch=runner.epoch, iter=iteration))
            runner.logger.warning(
                f'SIGTERM: iteration {iteration} is saved in {path!r}; the same command with --resume goes on from '
                'there.'
            )
        else:
            runner.logger.warning('SIGTERM: this kind of run cannot be continued here, so nothing is saved.')
        if waits:
            barrier()  # launchers kill the others when a process ends
        self.after_train(runner)
        raise SystemExit(TERMINATED)

    def _save(self, runner, meta: dict) -> str:
        hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        folder = getattr(hook, 'out_dir', None) or runner.work_dir
        backend = getattr(hook, 'backend_args', None)
        if backend is None and '://' not in folder:
            backend = dict(backend=ATOMIC_BACKEND)
        return write_checkpoint(
            runner,
            folder,
            CHECKPOINT_NAME,
            save_param_scheduler=runner.param_schedulers is not None,
            meta=meta,
            backend_args=backend,
        )
