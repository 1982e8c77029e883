# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import atexit
import ctypes
import datetime
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Optional

import torch
from mmengine.dist import all_reduce, barrier, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch.utils.data import DataLoader

from ...utils.private_apis import default_store
from ..optimizers.saved_groups import named_wrappers
from .checkpointing import ATOMIC_BACKEND, write_checkpoint
from .exact_resume import ExactResumeHook, resume_state

CHECKPOINT_NAME = 'stopped.pth'  # overwritten by the next stop; not counted by max_keep_ckpts
# Windows has SIGTERM alone
SIGNALS = [getattr(signal, name) for name in ('SIGTERM', 'SIGHUP', 'SIGUSR1') if hasattr(signal, name)]
STOP, SAVING, SAVED = (f'mmlinattn/stop/{name}' for name in ('asked', 'saving', 'saved'))  # keys of the store


class _Shielded:
    """``worker_init_fn`` of a DataLoader that ignores Ctrl-C and :data:`SIGNALS` in the worker, then calls ``init_fn``.
    Terminals and Slurm send signals to all processes of a run. The main process needs its workers for the rest of the
    iteration, and ends them itself. Workers end with the main process, also if it is killed."""

    def __init__(self, init_fn: Optional[Callable[[int], None]]):
        self.init_fn = init_fn
        self.main_ends = torch.zeros(1, dtype=torch.bool).share_memory_()
        atexit.register(self.main_ends.fill_, True)  # runs before multiprocessing terminates the workers

    def __call__(self, worker_id: int) -> None:
        for ignored in (signal.SIGINT, *SIGNALS):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if sys.platform == 'linux':
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans after a kill -9
        sys.excepthook = _excepthook
        if self.init_fn is not None:
            self.init_fn(worker_id)

    def _on_sigterm(self, signum, frame) -> None:
        if self.main_ends.item():
            os._exit(0)  # as PyTorch's own handler


def _excepthook(kind, error, traceback) -> None:
    """Silence connection errors of a worker's memory-sharing thread after Ctrl-C in the main process."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


def shield_workers(loader: DataLoader) -> None:
    """Let workers that ``loader`` starts from now on survive a SIGTERM to all processes."""
    if loader.num_workers > 0 and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


_forking = threading.local()  # mask: signals blocked by a thread before it forks


def _owner(number: int) -> Optional['StopHook']:
    """Return the StopHook that handles a signal of this number, or None."""
    found = getattr(signal.getsignal(number), '__self__', None)
    return found if isinstance(found, StopHook) else None


@functools.cache
def _reset_in_children() -> None:
    """Restore the default SIGTERM handler in processes forked while a StopHook handles the signal. Process pools (of
    metrics, for example) end their processes by SIGTERM, and would wait forever if these ignored it. The signal is
    blocked during the fork, as Python loses a signal that arrives while the child is set up."""

    def before() -> None:
        blocked = [signal.SIGTERM] if _owner(signal.SIGTERM) else []
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    def after(is_child: bool) -> None:
        if is_child and _owner(signal.SIGTERM):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)

    os.register_at_fork(before=before, after_in_parent=lambda: after(False), after_in_child=lambda: after(True))


def _sums(model: torch.nn.Module) -> list[float]:
    """Return the sum of each floating-point parameter and buffer, to detect that EMAHook has swapped weights."""
    values = [value for value in model.state_dict().values() if value.is_floating_point()]
    return torch.stack([value.double().sum() for value in values]).tolist()


@HOOKS.register_module(force=True)
class StopHook(Hook):
    """Save a checkpoint and exit on SIGTERM (Slurm, Kubernetes, torchrun), SIGUSR1 (Slurm) or SIGHUP (a terminal).

    - In training, the current iteration is finished, or with gradient accumulation all iterations up to the next update
      of the weights. Then ``stopped.pth`` is written beside the other checkpoints, and named in ``last_checkpoint``.
      ``--resume`` continues from it, even in the middle of an epoch (:class:`ExactResumeHook`).
    - In a validation, the checkpoint is saved at once. With :class:`ExactResumeHook`, the resumed run validates first.
    - Epoch-based runs without :class:`ExactResumeHook`, and loops other than MMEngine's two, exit without saving.
    - The exit status is 128 + number of the signal: 143 after SIGTERM.
    - An ignored SIGHUP (``nohup``) stays ignored, and handlers that other code has set stay.

    Args:
        save_on_sigterm (bool): Handle the signals. If False, they end the run at once.
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
        self.is_signalled = False  # this process got a signal
        self._signal = signal.SIGTERM  # which, or the one that another process got
        self._all_signalled = False  # all processes know of it
        self._previous: dict[int, Any] = {}  # the previous handlers
        self._averages: list[EMAHook] = []
        self._weights: list[float] = []

    def before_run(self, runner) -> None:
        for loop in (runner._train_loop, runner._val_loop):
            loader = getattr(loop, 'dataloader', None)
            if isinstance(loader, DataLoader):
                shield_workers(loader)

    def before_train(self, runner) -> None:
        if self.save_on_sigterm and threading.current_thread() is threading.main_thread():
            self._listen(runner)
        resume_state(runner)

    def _listen(self, runner) -> None:
        """Handle the :data:`SIGNALS` that have default handlers, and warn of another handler of SIGTERM."""
        self._terminals = [file for file in (1, 2) if os.isatty(file)]
        for number in SIGNALS:
            owner = _owner(number)  # of a training that ended in an error, or a second one of the config
            found = owner._previous[number] if owner else signal.getsignal(number)
            if found is signal.SIG_DFL or (found is signal.SIG_IGN and number == signal.SIGTERM):
                self._previous[number] = found
                _reset_in_children()
                signal.signal(number, self._on_signal)
            elif number == signal.SIGTERM:
                runner.logger.warning('StopHook: SIGTERM has a handler already, which stays: no checkpoint is saved.')

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if not self._previous:
            return
        if get_world_size() == 1:
            self._all_signalled = self.is_signalled
        elif not self._all_signalled and (runner.iter + 1) % self.interval == 0:
            any_signalled = torch.tensor([float(self.is_signalled)])
            all_reduce(any_signalled, op='max')
            self._all_signalled = bool(any_signalled.item())
        wrappers = named_wrappers(runner.optim_wrapper).values()
        # not in gradient accumulation; DeepSpeed's wrapper has no such method
        if self._all_signalled and all(each.should_update() for each in wrappers if hasattr(each, 'should_update')):
            self._save_and_exit(runner, runner.iter + 1)

    def before_val(self, runner) -> None:
        """Note the weights of the training: EMAHook may validate averaged ones."""
        self._averages = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
        self._weights = _sums(runner.model) if self._averages else []

    def before_val_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """Save and exit at once: a validation does not change weights. The first process saves. Others that got the
        signal ask it by the store of the process group, and wait."""
        if not self._previous:
            return
        store = default_store() if get_world_size() > 1 else None
        if store is not None and get_rank() > 0:
            if self.is_signalled:
                store.set(STOP, '1')
            if store.check([SAVING]):
                store.wait([SAVED], datetime.timedelta(hours=1))
                self.after_train(runner)
                raise SystemExit(128 + self._signal)
            return
        if not self.is_signalled and (store is None or not store.check([STOP])):
            return
        if store is not None:
            store.set(SAVING, '1')
        for hook in self._averages if _sums(runner.model) != self._weights else ():
            hook._swap_ema_parameters()
        self._save_and_exit(runner, runner.iter, store)

    def after_train(self, runner) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, signum, frame) -> None:
        self.is_signalled, self._signal = True, signal.Signals(signum)
        if self._signal.name == 'SIGHUP':  # writing to a closed terminal is an error
            for file in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), file)

    def _save_and_exit(self, runner, iteration: int, store: Any = None) -> None:
        """Save a checkpoint of ``iteration`` if a run can resume from it, and exit with the status of the signal. Other
        processes learn of the checkpoint by ``store``, the store of the process group, else by a barrier."""
        has_position = any(isinstance(hook, ExactResumeHook) and hook.batches is not None for hook in runner.hooks)
        said = 'this kind of run cannot be continued here, so nothing is saved.'
        if has_position or type(runner.train_loop) is IterBasedTrainLoop:
            path = self._save(runner, dict(epoch=runner.epoch, iter=iteration))
            said = f'iteration {iteration} is saved in {path!r}; the same command with --resume goes on from there.'
        runner.logger.warning(f'{self._signal.name}: {said}')
        if store is not None:
            store.set(SAVED, '1')
        else:
            barrier()  # launchers kill the others when a process ends
        self.after_train(runner)
        raise SystemExit(128 + self._signal)

    def _save(self, runner, meta: dict) -> str:
        """Write ``stopped.pth`` with ``meta``, the epoch and iteration, beside other checkpoints; return its path."""
        hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        folder = getattr(hook, 'out_dir', None) or runner.work_dir
        backend = getattr(hook, 'backend_args', None)
        if backend is None and '://' not in folder:
            backend = dict(backend=ATOMIC_BACKEND)
        options = dict(meta=meta, save_param_scheduler=runner.param_schedulers is not None, backend_args=backend)
        return write_checkpoint(runner, folder, CHECKPOINT_NAME, **options)
