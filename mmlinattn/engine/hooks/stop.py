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

CHECKPOINT_NAME = 'stopped.pth'  # one name: the next stop replaces it, and no rule for old checkpoints removes it
TERMINATED = 128 + signal.SIGTERM  # exit status, as shells count
GRACE = 30  # seconds that workers go on after a SIGTERM, as long as Slurm and torchrun wait before they kill


class _Shielded:
    """A ``worker_init_fn`` that leaves Ctrl-C and SIGTERM to the main process, then calls another.

    Terminals send Ctrl-C, and Slurm SIGTERM, to all processes of a run. The main process needs its workers for the rest
    of the iteration, and takes their end for an error. When it ends itself it sends SIGTERM, too: these are obeyed.
    """

    def __init__(self, init_fn):
        self.init_fn = init_fn
        self.main_ends = torch.zeros(1, dtype=torch.bool).share_memory_()
        atexit.register(self.main_ends.fill_, True)  # before multiprocessing's own, which terminates the workers

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
            os._exit(0)  # as PyTorch's own handler, which this one replaces
        signal.alarm(GRACE)


def _excepthook(kind, error, traceback) -> None:
    """Of a worker: its memory-sharing thread would print a traceback when Ctrl-C ends the main process."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


def shield_workers(loader: DataLoader) -> None:
    """Let the workers that a loader starts from now on outlive a SIGTERM for :data:`GRACE` seconds."""
    if getattr(loader, 'num_workers', 0) > 0 and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


_forking = threading.local()  # mask: the signals that a thread blocked before it forks


@functools.cache
def _spare_children() -> None:
    """Let processes that are forked while a StopHook listens end at a SIGTERM.

    Pools, of metrics for example, end theirs so, and would wait for ever. Python loses a signal that comes while it
    sets up the child, so it is blocked then.
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
    """At SIGTERM, which Slurm, Kubernetes and torchrun send, save a checkpoint and end with exit status 143.

    The iteration that is under way is finished; then ``stopped.pth`` is written to the folder of the other checkpoints
    and named in ``last_checkpoint``, so that ``--resume`` goes on from it, in the middle of an epoch too
    (:class:`ExactResumeHook` finds the place). In a validation it is saved at once, and the validation is left out.
    With gradient accumulation the run ends where the weights were updated.

    Epoch-based runs without :class:`ExactResumeHook` could not be continued in the middle of an epoch. They, and train
    loops other than MMEngine's two, end without saving.

    Args:
        save_on_sigterm (bool): False leaves SIGTERM alone: the run ends at once.
        interval (int): Iterations after which several processes ask each other whether one has to stop.
    """

    priority = 'LOWEST'  # after the hook that writes checkpoints, and the one that steps learning rates

    def __init__(self, save_on_sigterm: bool = True, interval: int = 10):
        if type(interval) is not int or interval < 1:
            raise ValueError(f'StopHook: interval={interval!r} has to be an integer from 1 up')
        self.save_on_sigterm = save_on_sigterm
        self.interval = interval
        self.is_asked = False  # this process had the signal
        self._is_agreed = False  # all processes know of it
        self._found: Any = None  # the handler in whose place this hook's is

    def before_run(self, runner) -> None:
        """Keep the workers alive that the last iteration needs."""
        for loop in (runner._train_loop, runner._val_loop):
            loader = getattr(loop, 'dataloader', None)
            if isinstance(loader, DataLoader):
                shield_workers(loader)

    def before_train(self, runner) -> None:
        if not self.save_on_sigterm or threading.current_thread() is not threading.main_thread():
            return
        found = signal.getsignal(signal.SIGTERM)
        other = getattr(found, '__self__', None)
        if isinstance(other, StopHook) and other not in runner.hooks:  # of a training that ended in an error
            found = other._found
        if found in (signal.SIG_DFL, signal.SIG_IGN):
            self._found = found
            _spare_children()
            signal.signal(signal.SIGTERM, self._on_sigterm)
        elif not isinstance(other, StopHook):  # one of the config's own, and of its base
            runner.logger.warning('StopHook: SIGTERM has a handler already, which stays: no checkpoint is saved.')

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Save and end where any process was asked to."""
        if self._found is None:
            return
        if get_world_size() == 1:
            self._is_agreed = self.is_asked
        elif not self._is_agreed and (runner.iter + 1) % self.interval == 0:
            is_asked = torch.tensor([float(self.is_asked)])
            all_reduce(is_asked, op='max')
            self._is_agreed = bool(is_asked.item())
        if self._is_agreed and _weights_are_updated(runner):
            self._save_and_end(runner, runner.iter + 1)

    def before_val_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """In a validation of a training, weights do not change: there is nothing to wait for."""
        if self._found is None or not self.is_asked:
            return
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):  # averaged weights are in the model's place while it is validated
                EMAHook.after_val_epoch(hook, runner)  # MMPretrain's would validate once more
        self._save_and_end(runner, runner.iter, waits=False)

    def after_train(self, runner) -> None:
        if self._found is not None:
            signal.signal(signal.SIGTERM, self._found)
            self._found = None

    def _on_sigterm(self, signum, frame) -> None:
        self.is_asked = True

    def _save_and_end(self, runner, iteration: int, waits: bool = True) -> None:
        if _can_resume(runner):
            path = self._save(runner, dict(epoch=runner.epoch, iter=iteration))
            runner.logger.warning(
                f'SIGTERM: iteration {iteration} is saved in {path!r}; the same command with --resume goes on from '
                'there.'
            )
        else:
            runner.logger.warning('SIGTERM: this kind of run cannot be continued here, so nothing is saved.')
        if waits:
            barrier()  # a process that ends makes launchers kill the others
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


def _can_resume(runner) -> bool:
    has_place = any(isinstance(hook, ExactResumeHook) and hook.batches is not None for hook in runner.hooks)
    return has_place or type(runner.train_loop) is IterBasedTrainLoop


def _weights_are_updated(runner) -> bool:
    """False between the iterations whose gradients one update sums."""
    should_update = getattr(runner.optim_wrapper, 'should_update', None)  # DeepSpeed's has none
    return should_update is None or should_update()
