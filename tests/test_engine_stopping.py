# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ctrl-C and SIGTERM, for a toy run; the tools are in test_cli_stopping.py."""

import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_toys import Count, make_runner
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from test_engine_resuming import losses
from torch import nn
from torch.utils.data import DataLoader

from mmlinattn.engine import ExactResumeHook, RunError, StopHook, cli, stopping
from mmlinattn.engine.data_check import _LateStart
from mmlinattn.engine.resuming import _batches_done
from mmlinattn.engine.stopping import ToolRun, _InterruptWatch, _Shielded, clean_end, end_workers, shield_workers

pytestmark = pytest.mark.skipif(os.name != 'posix', reason='signals')
TESTS = Path(__file__).resolve().parent
EPOCHS = dict(by_epoch=True, max_epochs=3)  # of 3 batches
ITERS = dict(by_epoch=False, max_iters=9)
VALIDATION = dict(
    val_cfg=dict(),
    val_evaluator=dict(type=Count),
    val_dataloader=dict(
        dataset=dict(type='ToyDataset', size=4), sampler=dict(type='DefaultSampler'), batch_size=2, num_workers=0
    ),
)


class SigtermAt(Hook):
    """Send the signal where a run is, at a stage such as ``before_train_iter``."""

    def __init__(self, stage, iteration):
        self.stage, self.iteration = stage, iteration
        setattr(self, stage, self.send)

    def send(self, runner, *args, **kwargs):
        if runner.iter == self.iteration:
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # else it would end the tests
            os.kill(os.getpid(), signal.SIGTERM)


def train(work_dir, loop, stage=None, at=None, hooks=(), stop=None, **kwargs):
    """Train, up to a SIGTERM where ``stage`` and ``at`` name a place for it; returns the Runner."""
    assert threading.current_thread() is threading.main_thread()
    found = signal.getsignal(signal.SIGTERM)
    names = ['CheckpointGuardHook', 'ExactResumeHook']
    runner = make_runner(
        work_dir,
        [*[dict(type=name) for name in names], dict(type='StopHook', **(stop or {})), *hooks],
        train_cfg=dict(loop),
        randomness=dict(seed=1),
        log_processor=dict(window_size=1, by_epoch=loop['by_epoch']),
        param_scheduler=[
            dict(type='StepLR', step_size=1, gamma=0.7, by_epoch=loop['by_epoch']),
            dict(type='MultiStepLR', milestones=[5, 7], by_epoch=False),  # before and after where runs are stopped
        ],
        **kwargs,
    )
    try:
        if stage is None:
            runner.train()
        else:
            runner.register_hook(SigtermAt(stage, at))
            with pytest.raises(SystemExit) as ended:
                runner.train()
            assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, found)
    return runner


def weights(runner):
    return [p.detach().clone() for p in runner.model.parameters()]


@pytest.mark.parametrize(
    'loop, stage, at, workers',
    [
        (EPOCHS, 'before_train_iter', 4, 0),  # in the middle of an epoch
        (EPOCHS, 'before_train_iter', 4, 2),
        (EPOCHS, 'before_train_iter', 5, 0),  # its last batch
        (EPOCHS, 'after_train_epoch', 6, 0),  # between two
        (ITERS, 'before_train_iter', 4, 2),
    ],
)
def test_a_run_that_was_terminated_resumes_with_equal_losses_and_weights(tmp_path, loop, stage, at, workers):
    loader = dict(num_workers=workers, persistent_workers=workers > 0)
    whole = train(tmp_path / 'whole', loop, loader=loader)
    train(tmp_path / 'cut', loop, stage, at, loader=loader)
    cut = tmp_path / 'cut'
    assert max(losses(cut)) == at + 1  # the iteration was finished
    assert (cut / 'last_checkpoint').read_text() == str(cut / 'stopped.pth')
    resumed = train(cut, loop, loader=loader, resume=True)
    assert losses(cut) == losses(tmp_path / 'whole')
    assert all(map(torch.equal, weights(whole), weights(resumed)))


@pytest.mark.parametrize('loop', [EPOCHS, ITERS], ids=['epochs', 'iterations'])
@pytest.mark.parametrize('stage, at', [('before_val_iter', 6), ('before_train_iter', 5)])
def test_a_validation_that_was_cut_off_is_made_up_for(tmp_path, monkeypatch, loop, stage, at):
    """Averaged weights are in the model's place then, and are not what is saved as the model's."""
    loop = dict(loop, val_interval=2 if loop['by_epoch'] else 6)
    kwargs = dict(VALIDATION, hooks=[dict(type='EMAHook', momentum=0.3)])
    monkeypatch.setattr(Count, 'calls', 0)
    whole = train(tmp_path / 'whole', loop, **kwargs)
    assert Count.calls == 2
    Count.calls = 0
    train(tmp_path / 'cut', loop, stage, at, **kwargs)
    assert Count.calls == 0
    resumed = train(tmp_path / 'cut', loop, **kwargs, resume=True)
    assert Count.calls == 2
    assert losses(tmp_path / 'cut') == losses(tmp_path / 'whole')
    assert all(map(torch.equal, weights(whole), weights(resumed)))


def test_stops_where_summed_gradients_were_used(tmp_path):
    hooks = [dict(type='LoggerHook')]
    train(tmp_path, ITERS, 'before_train_iter', 3, hooks=hooks, optim=dict(accumulative_counts=3))
    assert torch.load(tmp_path / 'stopped.pth', weights_only=False)['meta']['iter'] == 6


def test_opt_out(tmp_path):
    seen = []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(signal.getsignal(signal.SIGTERM))

    found = signal.getsignal(signal.SIGTERM)
    train(tmp_path, EPOCHS, hooks=[Look()], stop=dict(save_on_sigterm=False))
    assert set(seen) == {found}


@pytest.mark.parametrize('value', ['no', '', None, 0, 1])
def test_saving_is_on_or_off(value):
    with pytest.raises(ValueError) as found:
        StopHook(save_on_sigterm=value)
    assert str(found.value) == f'StopHook: save_on_sigterm={value!r} has to be True or False'
    assert StopHook().save_on_sigterm is StopHook(save_on_sigterm=True).save_on_sigterm is True
    assert StopHook(save_on_sigterm=False).save_on_sigterm is False


def test_the_handler_of_others_stays(tmp_path):
    mine, found = (lambda *_: None), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)
    try:
        train(tmp_path, EPOCHS)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, found)


def test_what_is_done_before_the_training(monkeypatch):
    """A handler of others is said to stay; a validation is made up for, with or without a handler."""
    lines, handled = [], []
    runs = SimpleNamespace(run=lambda: handled.append('validated'))
    runner = SimpleNamespace(logger=SimpleNamespace(warning=lines.append), val_loop=runs)
    monkeypatch.setattr(signal, 'signal', lambda *args: handled.append(args))

    def prepared(found, is_due, **options):
        handled.clear()
        hook = StopHook(**options)
        monkeypatch.setattr(signal, 'getsignal', lambda number: found)
        monkeypatch.setattr(hook, '_is_before_a_validation', lambda given: is_due and given is runner)
        hook.before_train(runner)
        return hook

    hook = prepared(signal.SIG_DFL, False)
    assert handled == [(signal.SIGTERM, hook._on_sigterm)] and (hook._found, hook._runner) == (signal.SIG_DFL, runner)
    assert prepared(signal.SIG_DFL, True, save_on_sigterm=False)._runner is None and handled == ['validated']
    assert lines == []
    assert prepared(print, True)._runner is None and handled == ['validated']
    assert lines == ['StopHook: SIGTERM has a handler already, which stays: no checkpoint is saved.']


@pytest.mark.parametrize(
    'meta, can_resume, is_due, expected',
    [
        (dict(stopped=dict(batch=0)), True, True, True),
        (dict(stopped=dict(batch=0), epoch=1), True, True, False),  # of another place in the training
        (dict(stopped=dict(batch=0), iter=5), True, True, False),
        (dict(stopped=dict(batch=1)), True, True, False),  # in the middle of an epoch
        (dict(stopped=[0]), True, True, False),
        (dict(stopped=None), True, True, False),
        (dict(stopped=dict(batch=0)), False, True, False),
        (dict(stopped=dict(batch=0)), True, False, False),
    ],
)
def test_whether_a_validation_is_to_be_made_up_for(monkeypatch, meta, can_resume, is_due, expected):
    hook = StopHook()
    hook.after_load_checkpoint(None, dict(meta={'epoch': 2, 'iter': 6, **meta}))
    monkeypatch.setattr(stopping, '_can_resume', lambda runner: can_resume)
    monkeypatch.setattr(stopping, '_validation_is_due', lambda runner: is_due)
    runner = SimpleNamespace(train_loop=SimpleNamespace(epoch=2, iter=6))
    assert hook._is_before_a_validation(runner) is expected
    hook.after_load_checkpoint(None, {})  # a bare state dict
    assert not hook._is_before_a_validation(runner)


def test_no_room_for_the_checkpoint_is_an_error(tmp_path):
    """The exit status 143 says that it was saved."""

    class FullDisk(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            raise OSError(28, 'No space left on device')

    with pytest.raises(RunError, match='stopped.pth could not be written: No space left on device'):
        train(tmp_path, ITERS, 'before_train_iter', 4, hooks=[FullDisk()])


@pytest.mark.parametrize('loop', [EPOCHS, ITERS], ids=['epochs', 'iterations'])
def test_an_iteration_after_a_validation_is_finished_as_any_other(tmp_path, loop):
    loop = dict(loop, val_interval=1 if loop['by_epoch'] else 3)
    train(tmp_path, loop, 'before_train_iter', 4, **VALIDATION)
    meta = torch.load(tmp_path / 'stopped.pth', weights_only=False)['meta']
    assert meta['iter'] == 5
    assert meta['stopped']['batch'] == (2 if loop['by_epoch'] else 0)


@pytest.mark.parametrize('is_listening', [True, False])
def test_an_error_nobody_asked_for_comes_through(is_listening):
    found = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), clean_end():
        if is_listening:
            signal.signal(signal.SIGTERM, StopHook()._on_sigterm)
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == found


def test_a_sigterm_outside_of_training_ends_in_its_status():
    """128 + 15, as a shell has it, which launchers tell from an error."""
    found = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, clean_end() as run:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143 and run.is_terminated and not run.is_interrupted
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, found)


@pytest.fixture
def interruptible():
    """A process that Ctrl-C reaches: those started in the background of a script ignore it."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


def test_what_listens_to_signals_ends_with_the_run(interruptible):
    before, wakeup = set(threading.enumerate()), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with clean_end():
        (watch,) = set(threading.enumerate()) - before
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    watch.join(30)
    assert not watch.is_alive()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.set_wakeup_fd(wakeup) == wakeup


def test_what_was_heard_before_is_heard_again(interruptible):
    """A descriptor for signals and a handler of Ctrl-C that others have put there; none of ours is left open."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    mine = signal.signal(signal.SIGINT, _ignore) and _ignore
    open_before, threads = set(os.listdir('/dev/fd')), set(threading.enumerate())
    try:
        with clean_end():
            assert signal.getsignal(signal.SIGINT) is mine
            for watch in set(threading.enumerate()) - threads:
                ended = watch
        ended.join(30)
        assert signal.getsignal(signal.SIGINT) is mine
        assert signal.set_wakeup_fd(before) == writer
        assert set(os.listdir('/dev/fd')) <= open_before  # others may have been collected
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _ignore(signum, frame):
    pass


class StopHookOfOthers(StopHook):
    pass


@pytest.mark.parametrize('hook', [StopHook, StopHookOfOthers])
@pytest.mark.parametrize('ends', ['well', 'by an error'])
def test_a_sigterm_that_was_ignored_is_ignored_again(ends, hook):
    """Also where the hook, which listens in training in any case, did not come to put it back."""
    found = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with suppress(ZeroDivisionError), clean_end():
            signal.signal(signal.SIGTERM, hook()._on_sigterm)
            if ends != 'well':
                raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, found)


def test_last_checkpoint_is_that_of_the_run_itself(tmp_path):
    run = ToolRun()
    assert run.last_checkpoint() is None
    run.work_dir = str(tmp_path)
    assert run.last_checkpoint() is None
    pointer = tmp_path / 'last_checkpoint'
    pointer.write_text('epoch_1.pth\n')
    os.utime(pointer, times=(time.time() - 60,) * 2)
    assert run.last_checkpoint() is None  # of a run before
    os.utime(pointer, times=(run._began - 1.1,) * 2)
    assert run.last_checkpoint() is None
    run.is_resumed = True
    assert run.last_checkpoint() == 'epoch_1.pth'
    run.is_resumed = False
    os.utime(pointer, times=(run._began - 0.9,) * 2)  # file systems may round to a second
    assert run.last_checkpoint() == 'epoch_1.pth'
    for content in (b'', b'\xff\xfe'):  # a write that was cut off, a file that is no text
        pointer.write_bytes(content)
        assert run.last_checkpoint() is None


@pytest.mark.parametrize('error, status', [(SystemExit(1), 1), (SystemExit(143), 143), (RuntimeError(), 143)])
def test_exit_status_after_sigterm(error, status):
    """A lost connection to a process that ended before is no error then."""
    found, hook = signal.getsignal(signal.SIGTERM), StopHook()
    with pytest.raises(SystemExit) as ended, clean_end():
        signal.signal(signal.SIGTERM, hook._on_sigterm)
        hook.is_asked = True
        raise error
    assert ended.value.code == status
    assert signal.getsignal(signal.SIGTERM) == found


def status_of_fork(target, *args, seconds=60):
    """How a process ends that calls ``target``; None where it takes longer."""
    process = multiprocessing.get_context('fork').Process(target=target, args=args)
    process.start()
    process.join(seconds)
    return process.exitcode


def _answer_with_an_error(number, output):
    """As MMEngine's Config.pretty_text does, before any other thread has its turn."""
    sys.stderr = open(output, 'w')
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setswitchinterval(30)
    with clean_end():
        try:
            os.kill(os.getpid(), number)
            time.sleep(20)
        except:  # noqa: E722
            raise SyntaxError('Failed to format the config file')  # noqa: B904


@pytest.mark.parametrize('name, status', [('SIGINT', 130), ('SIGTERM', 143)])
def test_a_signal_that_comes_out_as_another_error(tmp_path, name, status):
    output = tmp_path / 'output.txt'
    number = getattr(signal, name)
    assert status_of_fork(_answer_with_an_error, number, output) == status
    assert output.read_text() == ('interrupted.\n' if name == 'SIGINT' else '')


def _hear_nothing(numbers, patience, output):
    """What a handler raises is lost in callbacks, and a busy main thread does not come to it."""
    sys.stderr = open(output, 'w')
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _InterruptWatch.patience = {signal.SIGINT: patience, signal.SIGTERM: patience}
    _InterruptWatch.one_key_press = 0.1
    with clean_end():
        for number in numbers:
            try:
                os.kill(os.getpid(), number)
                time.sleep(1)
            except BaseException:
                time.sleep(0.3)
        time.sleep(30)
        os._exit(0)


@pytest.mark.parametrize(
    'names, patience, status',
    [
        (['SIGINT'], 0.2, 130),
        (['SIGINT', 'SIGINT'], 60, 130),
        (['SIGINT', 'SIGTERM'], 1, 130),  # torchrun passes on a Ctrl-C so
        (['SIGTERM'], 0.2, 143),
    ],
    ids=['SIGINT', 'twice', 'SIGINT, SIGTERM', 'SIGTERM'],
)
def test_a_main_thread_that_does_not_hear_is_ended(tmp_path, names, patience, status):
    output = tmp_path / 'output.txt'
    numbers = [getattr(signal, name) for name in names]
    assert status_of_fork(_hear_nothing, numbers, patience, output) == status
    assert output.read_text() == ('interrupted.\n' if names[0] == 'SIGINT' else '')


def _lose_a_connection(output):
    """A worker hands over a tensor, and the main process goes away in the middle."""
    sys.stderr = open(output, 'w')
    # every process group that an earlier test made has left a hook of PyTorch's, which puts '[rank0]: ' before lines
    sys.excepthook = sys.__excepthook__
    _Shielded(None)(0)
    handed_over = resource_sharer.DupFd(1)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(handed_over._id[0])
    connection.close()
    time.sleep(0.5)
    sys.excepthook(ValueError, ValueError('of the data set'), None)


def test_workers_say_nothing_of_connections_that_the_main_process_closed(tmp_path):
    output = tmp_path / 'output.txt'
    assert status_of_fork(_lose_a_connection, output, seconds=30) == 0
    assert output.read_text() == 'ValueError: of the data set\n'


@pytest.mark.parametrize(
    'error, is_said',
    [
        (ConnectionResetError(), False),
        (BrokenPipeError(), False),
        (EOFError(), False),
        (FileNotFoundError(), True),
        (OSError(28, 'No space left on device'), True),
        (TimeoutError(), True),
        (KeyboardInterrupt(), True),
    ],
    ids=repr,
)
def test_which_errors_of_a_thread_are_no_news(error, is_said):
    heard = []
    stopping._hears_no_lost_connections(lambda *args: heard.append(args))(type(error), error, 'trace')
    assert heard == [(type(error), error, 'trace')] * is_said


def test_workers_are_shielded_once_and_only_where_there_are_some():
    def mine(worker_id):
        pass

    loader = DataLoader(list(range(4)), num_workers=1, worker_init_fn=mine)
    shield_workers(loader)
    shielded = loader.worker_init_fn
    assert isinstance(shielded, _Shielded) and shielded.init_fn is mine
    shield_workers(loader)
    assert loader.worker_init_fn is shielded
    loader = DataLoader(list(range(4)), worker_init_fn=mine)
    shield_workers(loader)
    assert loader.worker_init_fn is mine


def test_workers_that_take_their_time_to_end_are_no_error(monkeypatch):
    """On a busy machine; PyTorch raises one in the main thread when a worker ends that it did not end itself."""
    batches = iter(DataLoader(list(range(4)), num_workers=1, persistent_workers=True))
    next(batches)
    handler, process = signal.getsignal(signal.SIGCHLD), multiprocessing.process.BaseProcess
    kill = process.kill
    monkeypatch.setattr(process, 'kill', lambda child: threading.Timer(1, kill, [child]).start())
    end_workers()
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGCHLD) == handler


@pytest.mark.parametrize('is_alive', [False, True])
def test_the_handler_of_workers_that_end_is_put_back_once_they_have(monkeypatch, is_alive):
    """5 s for all of them together; PyTorch's handler would raise an error for one that ends later."""
    steps, clock = [], iter([100, 101, 107])
    worker, slow = (
        SimpleNamespace(
            kill=lambda name=name: steps.append(('kill', name, signal.getsignal(signal.SIGCHLD))),
            join=lambda seconds, name=name: steps.append(('join', name, seconds)),
            is_alive=lambda name=name: is_alive and name == 'slow',
        )
        for name in ('worker', 'slow')
    )
    monkeypatch.setattr(stopping, 'multiprocessing', SimpleNamespace(active_children=lambda: [worker, slow]))
    monkeypatch.setattr(stopping, 'time', SimpleNamespace(monotonic=lambda: next(clock)))
    found = signal.signal(signal.SIGCHLD, _ignore)
    try:
        end_workers()
        assert signal.getsignal(signal.SIGCHLD) == (signal.SIG_DFL if is_alive else _ignore)
    finally:
        signal.signal(signal.SIGCHLD, found)
    kills = [('kill', name, signal.SIG_DFL) for name in ('worker', 'slow')]
    assert steps == [*kills, ('join', 'worker', 4), ('join', 'slow', 0)]


def test_fine_tuning_from_a_stopped_run_begins_with_a_whole_epoch(tmp_path):
    train(tmp_path / 'cut', EPOCHS, 'before_train_iter', 4)
    runner = train(tmp_path / 'tuned', EPOCHS, load_from=str(tmp_path / 'cut' / 'stopped.pth'))
    assert runner.iter == 9


def test_other_epochs_cannot_be_continued(tmp_path):
    train(tmp_path, EPOCHS, 'before_train_iter', 4)
    with pytest.raises(RunError, match='after 2 of the 3 batches of an epoch, and here an epoch has 6'):
        train(tmp_path, EPOCHS, loader=dict(batch_size=2), resume=True)


@pytest.mark.parametrize('stopped', [[1], dict(batch=1), dict(batch='1', num_batches=3), dict(batch=4, num_batches=3)])
def test_a_place_in_the_epoch_that_is_none(stopped):
    with pytest.raises(RunError) as found:
        _batches_done(stopped, 3)
    assert str(found.value) == (
        f'the checkpoint does not say where in its epoch it was saved: meta.stopped = {stopped!r}.'
    )


def test_the_line_about_epochs_of_another_length():
    with pytest.raises(RunError) as found:
        _batches_done(dict(batch=2, num_batches=3), 6)
    assert str(found.value) == (
        'the checkpoint was saved after 2 of the 3 batches of an epoch, and here an epoch has 6. Resume with the same '
        'data set, batch size and number of processes, or from the checkpoint of an epoch.'
    )


def test_a_whole_epoch_needs_no_place_in_it():
    assert _batches_done(dict(batch=0, num_batches=0), 3) == 0
    assert _batches_done(dict(batch=0, num_batches=5), 3) == 0
    assert _batches_done(dict(batch=3, num_batches=3), 3) == 3


@pytest.mark.parametrize('rank', ['RANK', 'SLURM_PROCID'])
def test_the_line_after_ctrl_c(tmp_path, monkeypatch, capsys, rank):
    for name in ('RANK', 'SLURM_PROCID'):
        monkeypatch.delenv(name, raising=False)

    def said(work_dir):
        run = ToolRun()
        run.work_dir = work_dir
        run.say_interrupted()
        run.say_interrupted()  # by the thread, and by the main thread
        return capsys.readouterr().err

    assert said(None) == 'interrupted.\n'
    work = str(tmp_path)
    began = f'interrupted: no checkpoint was written to {work!r} yet; the same command begins anew.\n'
    assert said(work) == began
    pointer = tmp_path / 'last_checkpoint'
    pointer.write_text('work/epoch_1.pth')
    os.utime(pointer, times=(time.time() + 60,) * 2)  # on a busy machine a run may begin late
    goes_on = (
        "interrupted: the last checkpoint is 'work/epoch_1.pth'; the same command with --resume goes on from there.\n"
    )
    assert said(work) == goes_on
    monkeypatch.setenv(rank, '1')
    assert said(work) == ''
    monkeypatch.setenv(rank, '0')
    assert said(work) == goes_on
    other = 'RANK' if rank == 'SLURM_PROCID' else 'SLURM_PROCID'
    monkeypatch.setenv(other, '1')  # torchrun in one task of Slurm's: the rank is torchrun's
    assert said(work) == (goes_on if rank == 'RANK' else '')


class Gone(io.StringIO):
    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize('name', ['stdout', 'stderr'])
@pytest.mark.parametrize('how', ['closed', 'none', 'gone'])
def test_a_run_ends_also_where_nobody_hears_the_line(monkeypatch, name, how):
    """Whoever reads the output may have gone first, or there was nobody (``>&-``); who reads the other stream has the
    line."""
    both = dict(stdout=io.StringIO(), stderr=io.StringIO())
    other = both['stderr' if name == 'stdout' else 'stdout']
    both[name] = None if how == 'none' else Gone() if how == 'gone' else io.StringIO()
    if how == 'closed':
        both[name].close()
    monkeypatch.setenv('RANK', '0')
    for stream, value in both.items():
        monkeypatch.setattr(sys, stream, value)
    ToolRun().say_interrupted()
    if name == 'stdout':
        assert other.getvalue() == 'interrupted.\n'
    with pytest.raises(SystemExit) as ended, cli.one_line_errors():
        raise RunError('why')
    assert ended.value.code == 1
    if name == 'stdout':
        assert other.getvalue() == 'interrupted.\nerror: why\n'


def test_workers_end_when_their_parent_says_so(monkeypatch):
    """Not at a SIGTERM of others, and not while nothing comes."""
    received = iter([None, SimpleNamespace(si_pid=8), SimpleNamespace(si_pid=7), SimpleNamespace(si_pid=7)])
    asked = []
    monkeypatch.setattr(os, 'getppid', lambda: 7)
    monkeypatch.setattr(os, '_exit', lambda status: asked.append(status))
    monkeypatch.setattr(signal, 'sigtimedwait', lambda signals, seconds: asked.append(set(signals)) or next(received))
    stopping._end_with_parent(7)
    assert asked == [{signal.SIGTERM}] * 3 + [0]
    asked.clear()
    stopping._end_with_parent(6)  # it is gone
    assert asked == [0]


def _tell(pipe, worker_id):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pipe.send((worker_id, {signal.SIGINT, signal.SIGTERM} <= blocked, signal.set_wakeup_fd(-1)))


def _start_as_a_worker(pipe):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    _Shielded(None)(2)
    _Shielded(partial(_tell, pipe))(3)  # MMEngine's is such an object, too


def test_a_worker_leaves_signals_to_the_main_process_and_is_set_up_as_ever():
    context = multiprocessing.get_context('fork')
    ours, theirs = context.Pipe()
    process = context.Process(target=_start_as_a_worker, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == (3, True, -1)
    process.join(60)


def test_how_the_tools_leave(monkeypatch):
    """After a good end the group of processes is destroyed; after an error workers end first, and it is aborted."""
    calls = []
    monkeypatch.setattr(stopping, 'end_workers', lambda: calls.append('workers'))
    monkeypatch.setattr(stopping, 'leave_process_group', lambda failed: calls.append(failed))
    with clean_end() as run:
        assert isinstance(run, ToolRun) and calls == []
    assert calls == [False]
    calls.clear()
    with pytest.raises(SystemExit) as ended, clean_end():
        raise SystemExit(3)
    assert ended.value.code == 3 and calls == ['workers', True]


def test_tools_in_a_thread_are_left_without_signals():
    found, watched = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)), []

    def run():
        before = threading.active_count()
        with clean_end() as run:
            watched.append((type(run), threading.active_count() - before))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert watched == [(ToolRun, 0)]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == found


@pytest.mark.parametrize('handler', [signal.SIG_IGN, lambda *_: None], ids=['ignored', 'of others'])
def test_tools_leave_a_handler_of_others_in_its_place(handler):
    found = signal.signal(signal.SIGTERM, handler)
    try:
        with clean_end():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, found)


def _press_once(output):
    """torchrun hands on what the terminal has sent as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _InterruptWatch.patience, _InterruptWatch.one_key_press = {signal.SIGINT: 30.0, signal.SIGTERM: 30.0}, 10.0
    with clean_end():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        except KeyboardInterrupt:
            time.sleep(0.1)  # until the first was seen
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            Path(output).write_text('went on to its end')
            raise


def test_one_key_press_may_come_twice(tmp_path):
    output = tmp_path / 'output.txt'
    assert status_of_fork(_press_once, str(output)) == 130 and output.exists()
    assert (
        _InterruptWatch.patience == {signal.SIGINT: 1.0, signal.SIGTERM: 3.0} and _InterruptWatch.one_key_press == 0.5
    )


def test_a_run_that_cannot_be_continued_ends_without_a_checkpoint(tmp_path):
    """In the middle of an epoch only ExactResumeHook finds the place."""
    lines = []

    class Listen(Hook):
        def before_run(self, runner):
            runner.logger.warning = lines.append

    found = signal.getsignal(signal.SIGTERM)
    runner = make_runner(tmp_path, [dict(type='StopHook'), Listen(), SigtermAt('before_train_iter', 4)])
    try:
        with pytest.raises(SystemExit) as ended:
            runner.train()
    finally:
        signal.signal(signal.SIGTERM, found)
    assert ended.value.code == 143 and runner.iter == 4
    assert not list(tmp_path.glob('stopped*'))
    assert lines[-1] == 'SIGTERM: this kind of run cannot be continued here, so nothing is saved.'


def test_what_is_saved_and_said_at_sigterm(tmp_path):
    """In the folder of the other checkpoints; without schedules; where the disk is full, too."""
    lines, kept, found = [], f'{tmp_path}/kept/work', signal.getsignal(signal.SIGTERM)

    class Watch(Hook):
        def __init__(self, is_full):
            self.is_full = is_full

        def before_train(self, runner):
            runner.logger.warning = lines.append

        def before_save_checkpoint(self, runner, checkpoint):
            if self.is_full and runner.iter == 4:
                raise OSError(28, 'No space left on device')

    def run(is_full):
        runner = make_runner(
            tmp_path / 'work',
            [*[dict(type=name) for name in ('CheckpointGuardHook', 'ExactResumeHook', 'StopHook')], Watch(is_full)],
            default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, out_dir=f'{tmp_path}/kept/')),
        )
        runner.register_hook(SigtermAt('before_train_iter', 4))
        runner.train()

    try:
        with pytest.raises(SystemExit):
            run(is_full=False)
        # MMEngine's own words on schedules that are not there are of the epoch's checkpoint
        assert ['save_param_scheduler' in line for line in lines] == [True, False]
        assert lines[1:] == [
            f"SIGTERM: iteration 5 is saved in '{kept}/stopped.pth'; the same command with --resume goes on from there."
        ]
        assert (tmp_path / 'work' / 'last_checkpoint').read_text() == f'{kept}/stopped.pth'
        assert not list((tmp_path / 'work').glob('*.pth'))
        meta = torch.load(f'{kept}/stopped.pth', weights_only=False)['meta']
        assert (meta['epoch'], meta['iter'], meta['stopped']) == (1, 5, dict(batch=2, num_batches=3))
        with pytest.raises(RunError) as full:
            run(is_full=True)
        assert str(full.value) == (
            f'{kept}/stopped.pth could not be written: No space left on device. The previous checkpoint '
            f'{kept}/epoch_1.pth is intact. Make room and start again with --resume.'
        )
    finally:
        signal.signal(signal.SIGTERM, found)


def listening(monkeypatch, **attributes):
    """A hook in a run whose ``_end`` notes down what it is given."""
    hook, ended = StopHook(), []
    monkeypatch.setattr(hook, '_end', lambda runner, *where: ended.append(where))
    loop = EpochBasedTrainLoop.__new__(EpochBasedTrainLoop)
    hook._runner = SimpleNamespace(train_loop=loop, epoch=2, iter=7, optim_wrapper=SimpleNamespace(), **attributes)
    return hook, ended


def test_all_processes_stop_where_one_was_asked_to(monkeypatch):
    hook, ended = listening(monkeypatch)
    hook.after_train_iter(hook._runner, 3)
    assert ended == []
    monkeypatch.setattr(stopping, 'get_world_size', lambda: 2)
    reduced = []
    monkeypatch.setattr(stopping, 'all_reduce', lambda tensor, op: reduced.append(op) or tensor.fill_(1))
    hook.after_train_iter(hook._runner, 3)
    assert reduced == ['max'] and ended == [(2, 8, 4)] and hook.is_asked
    hook._runner.train_loop = IterBasedTrainLoop.__new__(IterBasedTrainLoop)
    hook.after_train_iter(hook._runner, 3)
    assert ended[1:] == [(2, 8, 0)]
    runner, hook._runner = hook._runner, None  # not listening
    hook.after_train_iter(runner, 3)
    assert len(ended) == 2


def test_a_validation_ends_at_once_in_the_main_process(monkeypatch):
    hook, ended = listening(monkeypatch, hooks=[])
    hook.before_val_iter(hook._runner, 0)
    assert ended == [] and hook.is_validating
    hook._on_sigterm(signal.SIGTERM, None)
    hook._on_sigterm(signal.SIGTERM, None)
    assert ended == [(2, 7, 0)]
    hook.before_val_iter(hook._runner, 1)  # asked for in the iteration before
    assert len(ended) == 2
    monkeypatch.setattr(stopping, 'is_main_process', lambda: False)
    hook.before_val_iter(hook._runner, 1)
    assert len(ended) == 2


def test_averaged_weights_are_put_back_before_a_validation_ends(monkeypatch):
    """Those of the model stand aside while the average is validated."""

    class Average(EMAHook):  # MMPretrain has one of its own, too
        pass

    average = Average.__new__(Average)
    hook, ended = listening(monkeypatch, hooks=[Hook(), average])
    average.after_val_epoch = lambda runner: ended.append(('put back', runner is hook._runner))
    hook.before_val_iter(hook._runner, 0)
    hook._on_sigterm(signal.SIGTERM, None)
    assert ended == [('put back', True), (2, 7, 0)]


@pytest.mark.parametrize('is_validating', [False, True])
@pytest.mark.parametrize('can_resume', [False, True])
def test_how_a_run_ends(monkeypatch, is_validating, can_resume):
    """Other processes are waited for, as launchers kill them when one ends; not in a validation, where some are not."""
    steps, lines, hook = [], [], StopHook()
    for name in ('barrier', 'end_workers'):
        monkeypatch.setattr(stopping, name, lambda name=name: steps.append(name))
    monkeypatch.setattr(stopping, '_can_resume', lambda runner: can_resume)
    monkeypatch.setattr(hook, '_save', lambda runner, meta, batch: steps.append((meta, batch)) or 'a.pth')
    hook.is_validating = is_validating
    with pytest.raises(SystemExit) as ended:
        hook._end(SimpleNamespace(logger=SimpleNamespace(warning=lines.append)), 1, 5, 2)
    saved = [(dict(epoch=1, iter=5), 2)] if can_resume else []
    assert ended.value.code == 143 and steps == [*saved, *['barrier'] * (not is_validating), 'end_workers']
    assert lines == (
        ["SIGTERM: iteration 5 is saved in 'a.pth'; the same command with --resume goes on from there."]
        if can_resume
        else ['SIGTERM: this kind of run cannot be continued here, so nothing is saved.']
    )


@pytest.mark.parametrize('is_main', [True, False])
def test_where_and_how_it_is_saved(tmp_path, monkeypatch, is_main):
    monkeypatch.setattr(stopping, 'is_main_process', lambda: is_main)
    saved, pointer = [], tmp_path / 'last_checkpoint'
    runner = SimpleNamespace(
        hooks=[Hook()],
        work_dir=str(tmp_path),
        train_dataloader=[1, 2, 3],
        param_schedulers=None,
        save_checkpoint=lambda *args, **kwargs: saved.append((args, kwargs)),
    )
    atomic = dict(backend='mmlinattn.atomic_local')
    for hooks, schedulers, batch, folder, backend in (
        ([], None, 2, str(tmp_path), atomic),
        ([CheckpointHook(out_dir=f'{tmp_path}/out/')], [], 0, f'{tmp_path}/out', atomic),
        ([CheckpointHook(out_dir='s3://bucket/out/')], [], 1, 's3://bucket/out', None),
        ([CheckpointHook(backend_args=dict(backend='local'))], [], 1, str(tmp_path), dict(backend='local')),
    ):
        runner.hooks[1:], runner.param_schedulers = hooks, schedulers
        path = StopHook()._save(runner, dict(epoch=4, iter=7), batch)
        ((where, name), kwargs) = saved.pop()
        assert (where.rstrip('/'), name, path) == (folder, 'stopped.pth', f'{folder}/stopped.pth')
        assert kwargs == dict(
            save_param_scheduler=schedulers is not None,
            meta=dict(epoch=4, iter=7, stopped=dict(batch=batch, num_batches=3 if batch else 0)),
            by_epoch=False,
            backend_args=backend,
        )
        assert pointer.exists() is is_main and (not is_main or pointer.read_text() == path)


def test_weights_of_several_optimizers_are_updated_together(monkeypatch):
    one, other = (
        OptimWrapper(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), accumulative_counts=2) for _ in range(2)
    )
    runner = SimpleNamespace(optim_wrapper=OptimWrapperDict(one=one, other=other))
    monkeypatch.setattr(one, 'should_update', lambda: True)
    for is_due in (True, False):
        monkeypatch.setattr(other, 'should_update', lambda is_due=is_due: is_due)
        assert stopping._weights_are_updated(runner) is is_due
    assert stopping._weights_are_updated(SimpleNamespace(optim_wrapper=other)) is False


@pytest.mark.parametrize('kind, unit', [(EpochBasedTrainLoop, 'epoch'), (IterBasedTrainLoop, 'iter')])
def test_when_a_validation_is_due(kind, unit):
    def is_due(done, begin=4, val_loop=True, milestones=(0,), intervals=(3,)):
        loop = kind.__new__(kind)
        values = dict(_epoch=1, _iter=1, _max_epochs=99, _max_iters=99)  # nothing is due by the other unit
        values.update({f'_{unit}': done, f'_max_{unit}s': 10})
        vars(loop).update(values, val_begin=begin, dynamic_milestones=milestones, dynamic_intervals=intervals)
        return stopping._validation_is_due(SimpleNamespace(train_loop=loop, val_loop=val_loop or None))

    assert [done for done in range(1, 11) if is_due(done)] == [6, 9, 10]
    assert [done for done in range(1, 11) if is_due(done, begin=6, intervals=[2])] == [6, 8, 10]
    # from the eighth on after each
    assert [done for done in range(1, 11) if is_due(done, milestones=[0, 8], intervals=[4, 1])] == [4, 7, 8, 9, 10]
    assert not is_due(6, val_loop=False)


def test_listening_ends_with_the_training(tmp_path):
    """Of a handler that was there, of one that ignores the signal, and of an earlier run that ended by an error."""
    found, seen = signal.getsignal(signal.SIGTERM), []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(signal.getsignal(signal.SIGTERM))

    def run(name):
        seen.clear()
        hook = StopHook()
        make_runner(tmp_path / name, [hook, Look()], train_cfg=dict(by_epoch=True, max_epochs=1)).train()
        assert seen == [hook._on_sigterm] * 3 and hook._runner is None
        return signal.getsignal(signal.SIGTERM)

    try:
        for before in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, before)
            assert run(f'after {before!r}') == before
        failed = StopHook()
        failed._found = signal.SIG_DFL
        signal.signal(signal.SIGTERM, failed._on_sigterm)
        assert run('after an error') == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, found)


def test_workers_of_all_loops_are_shielded(monkeypatch):
    loaders = {stage: DataLoader(list(range(4)), num_workers=1) for stage in ('train', 'val', 'test')}
    runner = SimpleNamespace(hooks=[], _hooks=[Count], **{f'_{key}_loop': {} for key in loaders})
    for stage, loader in loaders.items():
        setattr(runner, f'_{stage}_loop', SimpleNamespace(dataloader=loader))
    hook = StopHook()
    hook.before_run(runner)
    assert all(isinstance(loader.worker_init_fn, _Shielded) for loader in loaders.values())
    assert type(runner._hooks[0]).__name__ == '_ValidationEnds' and runner._hooks[1:] == [Count]
    hook.is_validating = True
    runner._hooks[0].after_val_epoch(runner)
    assert not hook.is_validating
    runner.hooks = runner._hooks
    hook.before_run(runner)
    assert len(runner._hooks) == 2
    # MMEngine has started the workers of such a loop when it was built: without the shield
    loop = IterBasedTrainLoop.__new__(IterBasedTrainLoop)
    loop.dataloader = loaders['train']
    loop.dataloader_iterator = iter(())
    runner._train_loop = loop
    hook.before_run(runner)
    assert isinstance(loop.dataloader_iterator, _LateStart)
    quiet = SimpleNamespace(hooks=[], _hooks=[], _train_loop=None, _val_loop=None, _test_loop=None)
    StopHook(save_on_sigterm=False).before_run(quiet)
    assert quiet._hooks == []


def test_which_runs_can_be_continued():
    def run(kind, *hooks):
        return stopping._can_resume(SimpleNamespace(train_loop=kind.__new__(kind), hooks=hooks))

    class Other(IterBasedTrainLoop):
        pass

    class Resume(ExactResumeHook):
        pass

    resumes, leaves = Resume(), ExactResumeHook()
    resumes.batches = object()
    assert run(EpochBasedTrainLoop, StopHook(), resumes) and run(IterBasedTrainLoop)
    assert not run(EpochBasedTrainLoop, leaves) and not run(EpochBasedTrainLoop) and not run(Other, resumes)


def test_lost_connections_are_no_news():
    heard = []
    hook = stopping._hears_no_lost_connections(lambda *what: heard.append(what))
    for error in (ConnectionResetError(), BrokenPipeError(), EOFError(), ValueError()):
        hook(type(error), error, 'trace')
    ((kind, _, trace),) = heard
    assert (kind, trace) == (ValueError, 'trace')


def _train_on(output):
    """With a handler that finishes the iteration, as in training."""
    _InterruptWatch.patience = {signal.SIGINT: 0.1, signal.SIGTERM: 0.1}
    with clean_end():
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        Path(output).write_text('went on')
    os._exit(0)


def test_sigterm_in_training_is_left_to_the_training(tmp_path):
    output = tmp_path / 'output.txt'
    assert status_of_fork(_train_on, str(output)) == 0 and output.exists()


SCRIPT = """
import ctypes, signal, sys, time
from pathlib import Path

import torch
from engine_toys import ToyDataset, make_runner
from mmengine.hooks import Hook

from mmlinattn.engine import stopping

kind, work_dir = sys.argv[1:]
if kind == 'deaf twice':
    stopping._InterruptWatch.patience[signal.SIGINT] = 20


class Stall(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter < 4:
            return
        print('here', flush=True)
        if kind == 'in C':  # where Python's handler has to wait
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            ctypes.CDLL(None).sleep(20)
        while True:
            try:
                time.sleep(20)
            except KeyboardInterrupt:
                if not kind.startswith('deaf'):
                    raise


if __name__ == '__main__':
    with stopping.clean_end() as run:
        run.work_dir = work_dir
        loader = dict(num_workers=2, persistent_workers=True)
        make_runner(Path(work_dir), [dict(type='StopHook'), Stall()], loader=loader).train()
"""


def children(pid):
    listed = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def is_alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self').exists(), reason='looks for processes in /proc')
@pytest.mark.parametrize('kind', ['idle', 'in C', 'deaf', 'deaf twice'])
def test_ctrl_c(tmp_path, kind):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), kind, str(tmp_path / 'work')],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=f'{TESTS}:{TESTS.parent}'),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == 'here\n'
    workers = children(process.pid)
    assert len(workers) == 2
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    if kind == 'deaf twice':
        time.sleep(2)  # what comes within half a second is the same
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert process.returncode == 130
    lines = [line for line in errors.splitlines() if 'interrupted' in line or 'Traceback' in line]
    path = str(tmp_path / 'work' / 'epoch_1.pth')
    assert lines == [
        f"interrupted: the last checkpoint is '{path}'; the same command with --resume goes on from there."
    ]
    assert errors.splitlines()[-1] == lines[0]
    assert not any(is_alive(worker) for worker in workers)
    assert seconds < 5, seconds  # for a worker PyTorch waits as long, the stalls and the patience above much longer


@pytest.mark.slow
def test_sigterm_outside_of_training_ends_a_process_that_does_not_hear():
    """What a signal handler raises is lost where Python calls back, as in ``__del__``."""
    script = """
import time

from mmlinattn.engine.stopping import clean_end


class Deaf:
    def __del__(self):
        print('here', flush=True)
        time.sleep(20)


with clean_end():
    Deaf()
    time.sleep(20)
"""
    process = subprocess.Popen(
        [sys.executable, '-c', script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(TESTS.parent)),
    )
    assert process.stdout.readline() == 'here\n'
    began = time.monotonic()
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self').exists(), reason='looks for processes in /proc')
def test_workers_end_with_a_main_process_that_was_killed():
    script = """
import os, time

from mmlinattn.engine.stopping import _Shielded

if os.fork() == 0:
    _Shielded(None)(0)
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, '-c', script],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(TESTS.parent)),
    )
    worker = int(process.stdout.readline())
    os.kill(worker, signal.SIGTERM)  # not from its parent
    time.sleep(0.5)
    assert is_alive(worker)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.1)
