# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How a run ends before its time: at Ctrl-C, at SIGTERM, at an error."""

import atexit
import logging
import multiprocessing
import os
import os.path as osp
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import Optional

import torch.distributed
from mmengine.dist import all_reduce, barrier, get_world_size, is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader

from ..utils.errors import say_last
from .checkpointing import ATOMIC_BACKEND, AtomicLocalBackend, explained_write_errors, previous_checkpoint
from .data_check import start_workers_late
from .distributed import leave_process_group
from .resuming import ExactResumeHook

__all__ = ['CHECKPOINT_NAME', 'StopHook', 'ToolRun', 'clean_end', 'shield_workers']

CHECKPOINT_NAME = 'stopped.pth'  # one name: the next stop replaces it, and no rule for old checkpoints removes it
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit statuses, as shells count them
HOW_TO_GO_ON = 'the same command with --resume goes on from there'


def end_workers() -> None:
    """Kill the data-loader workers of this process; PyTorch would wait up to 5 s for each."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD)
    if is_main:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises an error for each that ends
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    deadline = time.monotonic() + 5  # a busy machine takes its time to end what was killed
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    if is_main and handler is not None and not any(child.is_alive() for child in children):
        signal.signal(signal.SIGCHLD, handler)


def _end_with_parent(parent: int) -> None:
    """End this worker when its parent says so, or is gone: after a kill -9, PyTorch's workers can wait for ever."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


def _hears_no_lost_connections(hook):
    """An ``excepthook`` for workers: the thread that hands tensors over (``multiprocessing.resource_sharer``) reports
    through it that the main process, which is ending, has closed the connection. That is no news after Ctrl-C."""

    def excepthook(kind, error, trace):
        if not isinstance(error, (ConnectionError, EOFError)):
            hook(kind, error, trace)

    return excepthook


class _Shielded:
    """A ``worker_init_fn`` that leaves Ctrl-C and SIGTERM to the main process, then calls another."""

    def __init__(self, init_fn):
        self.init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        signal.set_wakeup_fd(-1)  # that of the main process, when forked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        sys.excepthook = _hears_no_lost_connections(sys.excepthook)
        threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
        if self.init_fn is not None:
            self.init_fn(worker_id)


def shield_workers(loader: DataLoader) -> None:
    """Let the workers that a loader starts from now on end at SIGTERM only when the main process sends it.

    Terminals send Ctrl-C, and Slurm SIGTERM, to all processes of a run. The main process needs its workers for the
    rest of the iteration, and would take their end for an error.
    """
    can_shield = hasattr(signal, 'sigtimedwait') and getattr(loader, 'num_workers', 0) > 0
    if can_shield and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


def _rank() -> int:
    """Of this process in its run, also before the processes have joined."""
    return int(os.environ.get('RANK', os.environ.get('SLURM_PROCID', 0)))


class ToolRun:
    """What :func:`clean_end` tells the user about: set ``work_dir`` once it is known.

    Attributes:
        work_dir: The work dir of a training; None for runs that write no checkpoint.
        is_resumed: Whether the run went on from a checkpoint, so that an old one in the work dir is its own.
    """

    def __init__(self):
        self.work_dir: Optional[str] = None
        self.is_resumed = False
        self.is_interrupted = False
        self.is_terminated = False
        self._began = time.time()
        self._said = threading.Lock()

    def last_checkpoint(self) -> Optional[str]:
        """The path in ``last_checkpoint``, if it is of this run."""
        with suppress(OSError, ValueError):
            pointer = osp.join(self.work_dir or '', 'last_checkpoint')
            if self.is_resumed or osp.getmtime(pointer) >= self._began - 1:  # file systems round down
                with open(pointer) as stream:
                    return stream.read(4096).strip() or None
        return None

    def say_interrupted(self) -> None:
        """The one line after Ctrl-C, from one process of the run."""
        if not self._said.acquire(blocking=False) or _rank() != 0:
            return
        line = 'interrupted.'
        if self.work_dir is not None:
            path = self.last_checkpoint()
            line = (
                f'interrupted: the last checkpoint is {path!r}; {HOW_TO_GO_ON}.'
                if path
                else f'interrupted: no checkpoint was written to {self.work_dir!r} yet; the same command begins anew.'
            )
        say_last(line)


class _InterruptWatch:
    """A thread that ends the process at Ctrl-C, or at a SIGTERM outside of training, where the main thread does not.

    Python's own handlers wait until the main thread is back from what it computes, or waits for, and what they raise is
    lost in callbacks. The thread learns of the signal at once. It gives the main thread ``patience`` seconds to end,
    and none after a second Ctrl-C.
    """

    patience = {signal.SIGINT: 1.0, signal.SIGTERM: 3.0}
    one_key_press = 0.5  # torchrun hands on the Ctrl-C that its processes had from the terminal as well

    def __init__(self, run: ToolRun):
        self.run = run
        self.has_raised = False

    def __enter__(self):
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.previous = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._raise_once)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.run.is_interrupted or self.has_raised:
            return  # the thread sees the process to its end
        signal.set_wakeup_fd(self.previous)
        os.close(self.writer)
        if signal.getsignal(signal.SIGINT) == self._raise_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _raise_once(self, signum, frame) -> None:
        if not self.has_raised:  # a second one would end in a traceback out of what ends the run
            # not left to the thread: some code answers whatever is raised in it with an error of its own (MMEngine's
            # Config.pretty_text), which can get to the end of the run before the thread has its turn
            self.has_raised = self.run.is_interrupted = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        first, end, status = None, None, INTERRUPTED
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self.reader], [], [], left)[0]:
                break
            signals = os.read(self.reader, 64)
            if not signals:
                os.close(self.reader)
                return
            now = time.monotonic()
            if signal.SIGINT in signals:
                if first is not None and now > first + self.one_key_press:
                    break
                if first is None:
                    first, self.run.is_interrupted = now, True
                    end, status = now + self.patience[signal.SIGINT], INTERRUPTED
            elif signal.SIGTERM in signals and end is None and _leaves(signal.getsignal(signal.SIGTERM)):
                end, status = now + self.patience[signal.SIGTERM], TERMINATED
        self.has_raised = True  # the main thread may wake up as its workers end, and is not to be disturbed then
        if status == INTERRUPTED:
            self.run.say_interrupted()
        end_workers()
        os._exit(status)


class _LeaveAtSigterm:
    """The handler outside of training."""

    def __init__(self, run: ToolRun):
        self.run = run

    def __call__(self, signum, frame) -> None:
        self.run.is_terminated = True
        raise SystemExit(TERMINATED)


def _leaves(handler) -> bool:
    return isinstance(handler, _LeaveAtSigterm)


@contextmanager
def clean_end():
    """For the main function of a tool: whatever ends it, workers and process group end with it.

    Ctrl-C ends in one line that says where the last checkpoint is, and exit status 130; SIGTERM in status 143
    (:class:`StopHook` saves a checkpoint before). Errors pass through.

    Yields:
        A :class:`ToolRun`.
    """
    run = ToolRun()
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be had
        yield run
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _LeaveAtSigterm(run))
    status, watch = None, _InterruptWatch(run)
    try:
        with watch:
            yield run
        leave_process_group(failed=False)
    except BaseException as error:
        watch.has_raised = True
        if isinstance(error, KeyboardInterrupt) or run.is_interrupted:
            status = INTERRUPTED
        elif error.code == TERMINATED if isinstance(error, SystemExit) else run.is_terminated or _asked_to_stop():
            # the last where another process of the run was faster, and this one lost its connection
            status = TERMINATED
        was_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        end_workers()
        leave_process_group(failed=True)
        if status is None:
            raise
        if status == INTERRUPTED:
            run.say_interrupted()
        if status == INTERRUPTED or was_distributed:
            # What the interpreter does beyond this takes seconds on a busy machine. And an aborted group leaves threads
            # behind, which may abort the process with another status.
            atexit._run_exitfuncs()
            logging.shutdown()
            os._exit(status)
        raise SystemExit(status) from None
    finally:
        found = signal.getsignal(signal.SIGTERM)
        if _leaves(found) or _hook_of(found) is not None:
            signal.signal(signal.SIGTERM, handler)


def _hook_of(handler) -> Optional['StopHook']:
    """The hook whose handler it is, also of a run that has ended by an error."""
    owner = getattr(handler, '__self__', None)
    return owner if isinstance(owner, StopHook) else None


def _asked_to_stop() -> bool:
    hook = _hook_of(signal.getsignal(signal.SIGTERM))
    return hook is not None and hook.is_asked


class _ValidationEnds(Hook):
    """Tells the :class:`StopHook` before any other hook that the figures of a validation are there."""

    priority = 'HIGHEST'

    def __init__(self, stop: 'StopHook'):
        self.stop = stop

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.stop.is_validating = False


@HOOKS.register_module(force=True)
class StopHook(Hook):
    """At SIGTERM, which Slurm, Kubernetes and torchrun send, save a checkpoint and end with exit status 143.

    The iteration that is under way is finished, on all processes the same one; then ``stopped.pth`` is written to the
    folder of the other checkpoints and named in ``last_checkpoint``, so that ``--resume`` goes on from it, in the
    middle of an epoch too (:class:`ExactResumeHook` finds the place). A validation that was cut off, or due, is made
    up for first. With gradient accumulation it ends where the weights were updated.

    Epoch-based runs without :class:`ExactResumeHook` could not be continued in the middle of an epoch. They, and train
    loops other than MMEngine's two, end without saving.

    Args:
        save_on_sigterm: False leaves SIGTERM alone: the run ends at once.
    """

    priority = 'LOWEST'  # after the hook that writes checkpoints, and the one that steps learning rates

    def __init__(self, save_on_sigterm: bool = True):
        if not isinstance(save_on_sigterm, bool):
            raise ValueError(f'StopHook: save_on_sigterm={save_on_sigterm!r} has to be True or False')
        self.save_on_sigterm = save_on_sigterm
        self.is_asked = False
        self.is_validating = False
        self._meta: dict = {}
        self._runner = None

    def before_run(self, runner) -> None:
        """Shield the workers of all loops that run."""
        for stage in ('train', 'val', 'test'):
            loader = getattr(getattr(runner, f'_{stage}_loop'), 'dataloader', None)
            if isinstance(loader, DataLoader):
                shield_workers(loader)
        if isinstance(runner._train_loop, IterBasedTrainLoop):
            start_workers_late(runner._train_loop)
        if self.save_on_sigterm and not any(isinstance(hook, _ValidationEnds) for hook in runner.hooks):
            # a new list, as the Runner is going through the old one
            runner._hooks = [_ValidationEnds(self), *runner._hooks]

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """See whether it is one of this hook; only a run that resumes is then where the meta data says."""
        self._meta = checkpoint.get('meta') or {}

    def before_train(self, runner) -> None:
        """Listen from here on, and make up for the validation at which the run was stopped."""
        if self.save_on_sigterm and threading.current_thread() is threading.main_thread():
            found = signal.getsignal(signal.SIGTERM)
            before = _hook_of(found)
            found = before._found if before is not None else found
            if found in (signal.SIG_DFL, signal.SIG_IGN) or _leaves(found):
                self._found, self._runner = found, runner
                signal.signal(signal.SIGTERM, self._on_sigterm)
            else:
                runner.logger.warning('StopHook: SIGTERM has a handler already, which stays: no checkpoint is saved.')
        if self._is_before_a_validation(runner):
            runner.val_loop.run()

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        """Save and end where any process was asked to."""
        if self._runner is None:
            return
        is_asked = torch.tensor([float(self.is_asked)])
        if get_world_size() > 1:
            all_reduce(is_asked, op='max')
        if not is_asked.item() or not _weights_are_updated(runner):
            return
        self.is_asked = True
        is_epochs = type(runner.train_loop) is EpochBasedTrainLoop
        self._end(runner, runner.epoch, runner.iter + 1, batch_idx + 1 if is_epochs else 0)

    def before_val_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        """From here to the figures, weights do not change: there is nothing to wait for."""
        self.is_validating = True
        if self.is_asked:
            self._end_in_validation()

    def after_train(self, runner) -> None:
        """Stop listening."""
        if self._runner is not None:
            signal.signal(signal.SIGTERM, self._found)
            self._runner = None

    def _is_before_a_validation(self, runner) -> bool:
        loop, stopped = runner.train_loop, self._meta.get('stopped')
        if not isinstance(stopped, dict) or (self._meta.get('epoch'), self._meta.get('iter')) != (
            loop.epoch,
            loop.iter,
        ):
            return False
        return stopped.get('batch') == 0 and _can_resume(runner) and _validation_is_due(runner)

    def _on_sigterm(self, signum, frame) -> None:
        is_first, self.is_asked = not self.is_asked, True
        if is_first and self.is_validating:
            self._end_in_validation()

    def _end_in_validation(self) -> None:
        # The others find the connection gone, or see to it that all end after the next train iteration.
        if self._runner is None or not is_main_process():
            return
        runner = self._runner
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):  # averaged weights are in the model's place while it is validated
                hook.after_val_epoch(runner)
        self._end(runner, runner.epoch, runner.iter, 0)

    def _end(self, runner, epoch: int, iteration: int, batch: int) -> None:
        if _can_resume(runner):
            path = self._save(runner, dict(epoch=epoch, iter=iteration), batch)
            runner.logger.warning(f'SIGTERM: iteration {iteration} is saved in {path!r}; {HOW_TO_GO_ON}.')
        else:
            runner.logger.warning('SIGTERM: this kind of run cannot be continued here, so nothing is saved.')
        if not self.is_validating:
            barrier()  # a process that ends makes launchers kill the others
        end_workers()
        raise SystemExit(TERMINATED)

    def _save(self, runner, meta: dict, batch: int) -> str:
        hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        folder = getattr(hook, 'out_dir', None) or runner.work_dir
        backend = getattr(hook, 'backend_args', None)
        if backend is None and '://' not in folder:
            backend = dict(backend=ATOMIC_BACKEND)
        meta['stopped'] = dict(batch=batch, num_batches=len(runner.train_dataloader) if batch else 0)
        path = f'{folder.rstrip("/")}/{CHECKPOINT_NAME}'
        with explained_write_errors(path, previous_checkpoint(runner, hook)):
            runner.save_checkpoint(
                folder,
                CHECKPOINT_NAME,
                save_param_scheduler=runner.param_schedulers is not None,
                meta=meta,
                by_epoch=False,
                backend_args=backend,
            )
            if is_main_process():
                AtomicLocalBackend().put_text(path, osp.join(runner.work_dir, 'last_checkpoint'))
        return path


def _can_resume(runner) -> bool:
    kind = type(runner.train_loop)
    if kind is EpochBasedTrainLoop:
        return any(isinstance(hook, ExactResumeHook) and hook.batches is not None for hook in runner.hooks)
    return kind is IterBasedTrainLoop


def _weights_are_updated(runner) -> bool:
    """False between the iterations whose gradients one update sums."""
    wrappers = runner.optim_wrapper
    wrappers = wrappers.values() if hasattr(wrappers, 'values') else [wrappers]
    return all(wrapper.should_update() for wrapper in wrappers if hasattr(wrapper, 'should_update'))


def _validation_is_due(runner) -> bool:
    """Whether the train loop, where it stands now, would validate before it went on."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    loop._decide_current_val_interval()
    done, end = (loop.epoch, loop.max_epochs) if type(loop) is EpochBasedTrainLoop else (loop.iter, loop.max_iters)
    return done >= loop.val_begin and (done % loop.val_interval == 0 or done == end)
