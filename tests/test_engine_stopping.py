# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Ctrl-C and SIGTERM, for a toy run; the tools are in test_cli_stopping.py."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
import torch
from engine_toys import Count, make_runner
from mmengine.hooks import Hook
from test_engine_resuming import losses
from torch.utils.data import DataLoader

from mmlinattn.engine import RunError, StopHook
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
    with pytest.raises(ValueError, match="save_on_sigterm='no' has to be True or False"):
        StopHook(save_on_sigterm='no')


def test_the_handler_of_others_stays(tmp_path):
    mine, found = (lambda *_: None), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)
    try:
        train(tmp_path, EPOCHS)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, found)


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


def test_last_checkpoint_is_that_of_the_run_itself(tmp_path):
    run = ToolRun()
    assert run.last_checkpoint() is None
    run.work_dir = str(tmp_path)
    assert run.last_checkpoint() is None
    pointer = tmp_path / 'last_checkpoint'
    pointer.write_text('epoch_1.pth\n')
    os.utime(pointer, times=(time.time() - 60,) * 2)
    assert run.last_checkpoint() is None  # of a run before
    run.is_resumed = True
    assert run.last_checkpoint() == 'epoch_1.pth'
    run.is_resumed = False
    os.utime(pointer)
    assert run.last_checkpoint() == 'epoch_1.pth'
    pointer.write_text('')
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
    process = multiprocessing.get_context('fork').Process(target=_answer_with_an_error, args=(number, output))
    process.start()
    process.join(60)
    assert process.exitcode == status
    assert output.read_text() == ('interrupted.\n' if name == 'SIGINT' else '')


def _hear_nothing(number, times, patience, output):
    """What a handler raises is lost in callbacks, and a busy main thread does not come to it."""
    sys.stderr = open(output, 'w')
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _InterruptWatch.patience = {signal.SIGINT: patience, signal.SIGTERM: patience}
    _InterruptWatch.one_key_press = 0.1
    with clean_end():
        for _ in range(times):
            try:
                os.kill(os.getpid(), number)
                time.sleep(1)
            except BaseException:
                time.sleep(0.3)
        time.sleep(30)
        os._exit(0)


@pytest.mark.parametrize(
    'name, times, patience, status', [('SIGINT', 1, 0.2, 130), ('SIGINT', 2, 60, 130), ('SIGTERM', 1, 0.2, 143)]
)
def test_a_main_thread_that_does_not_hear_is_ended(tmp_path, name, times, patience, status):
    output = tmp_path / 'output.txt'
    process = multiprocessing.get_context('fork').Process(
        target=_hear_nothing, args=(getattr(signal, name), times, patience, output)
    )
    process.start()
    process.join(60)
    assert process.exitcode == status
    assert output.read_text() == ('interrupted.\n' if name == 'SIGINT' else '')


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
    process = multiprocessing.get_context('fork').Process(target=_lose_a_connection, args=(output,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert output.read_text() == 'ValueError: of the data set\n'


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
    with pytest.raises(RunError, match='meta.stopped = '):
        _batches_done(stopped, 3)


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
