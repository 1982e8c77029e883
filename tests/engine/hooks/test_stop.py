# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.engine_toys import At, make_runner, validation, warnings_of
from mmengine.optim import OptimWrapper, OptimWrapperDict

from mmlinattn.engine.hooks import stop
from mmlinattn.engine.hooks.stop import shield_workers

HOOKS = [dict(type='ExactResumeHook'), dict(type='StopHook')]


@pytest.fixture(autouse=True)
def hangups_end_a_process():
    """Also if the tests run under nohup, which ignores them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stopped(folder, iteration, mode='train', skip=0, number=signal.SIGTERM, hooks=HOOKS, **options):
    """Run the handler of a signal in an iteration; return the checkpoint, or None.

    The signal itself, which ends a process without a handler, is sent in ``tests/tools/test_stopping.py``.
    """
    runner = make_runner(folder, hooks, **options)
    runner.register_hook(At(iteration, lambda _: signal.getsignal(number)(number, None), mode, skip), 'VERY_HIGH')
    with pytest.raises(SystemExit) as end:
        runner.train()
    assert end.value.code == 128 + number
    assert [signal.getsignal(number) for number in stop.SIGNALS] == [signal.SIG_DFL] * len(stop.SIGNALS)
    found = list(folder.parent.glob('**/stopped.pth'))
    return torch.load(found[0], weights_only=False) if found else None


@pytest.mark.parametrize('number', stop.SIGNALS)
@pytest.mark.parametrize('loop', [dict(by_epoch=True, max_epochs=3), dict(by_epoch=False, max_iters=9)])
def test_a_stopped_run_is_saved(tmp_path, loop, number):
    """Resumed in ``test_exact_resume_of_hooks.py``."""
    assert stopped(tmp_path / 'work', 4, number=number, train_cfg=loop)['meta']['iter'] == 5
    assert (tmp_path / 'work/last_checkpoint').read_text() == str(tmp_path / 'work/stopped.pth')


@pytest.mark.parametrize(
    ('number', 'handler', 'hooks'),
    [
        (signal.SIGHUP, signal.SIG_IGN, HOOKS),  # as under nohup
        (signal.SIGTERM, lambda *_: None, HOOKS),
        (signal.SIGTERM, signal.SIG_DFL, [*HOOKS, HOOKS[1]]),  # of a config and of its base
    ],
    ids=['ignored hangup', 'handler of another program', 'two hooks'],
)
def test_handlers_of_other_programs_stay(tmp_path, number, handler, hooks):
    """A warning says so where no checkpoint is saved at the end of a job."""
    before, seen, made = signal.signal(number, handler), [], make_runner(tmp_path, hooks)
    made.register_hook(At(4, lambda _: seen.append(signal.getsignal(number))))
    try:
        warns = warnings_of(made, 'SIGTERM has a handler already, which stays: no checkpoint')
    finally:
        assert signal.signal(number, before) is handler
    assert (seen == [handler]) == (hooks is HOOKS) and made.iter == 6
    assert len(warns) == (number == signal.SIGTERM and hooks is HOOKS)


def fork(runner):
    """Fork processes, like pools of metrics, and end them."""
    for _ in range(24):
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM  # 0 after its sleep
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_forked_processes_end_at_a_sigterm(tmp_path):
    runner = make_runner(tmp_path, HOOKS, train_cfg=dict(by_epoch=True, max_epochs=1))
    runner.register_hook(At(2, fork))
    runner.train()
    assert runner.iter == 3


def test_a_training_after_one_that_failed(tmp_path):
    failing = make_runner(tmp_path / 'first', HOOKS)
    failing.model.train_step = None
    with pytest.raises(TypeError):
        failing.train()
    assert stopped(tmp_path / 'second', 4)['meta']['iter'] == 5


def test_in_a_validation_it_is_saved_at_once(tmp_path):
    """Save the weights, not their averages, beside the other checkpoints."""
    saved = stopped(
        tmp_path / 'work',
        6,
        'val',
        hooks=[*HOOKS, dict(type='EMAHook')],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, out_dir=str(tmp_path / 'out'))),
        param_scheduler=dict(type='ConstantLR', factor=0.5),
        **validation(),
    )
    epoch = torch.load(tmp_path / 'out/work/epoch_2.pth', weights_only=False)
    assert (tmp_path / 'out/work/stopped.pth').exists()
    assert saved['meta']['iter'] == 6 and saved['param_schedulers'] == epoch['param_schedulers']
    assert all(torch.equal(value, epoch['state_dict'][key]) for key, value in saved['state_dict'].items())
    assert not torch.equal(saved['state_dict']['layer.weight'], saved['ema_state_dict']['module.layer.weight'])


def test_accumulated_gradients_are_applied_first(tmp_path):
    assert stopped(tmp_path / 'work', 3, optim=dict(accumulative_counts=3))['meta']['iter'] == 6


def test_a_process_stops_with_another(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stop, 'get_world_size', lambda: 2)
    monkeypatch.setattr(stop, 'all_reduce', lambda own, op: asked.append((own.item(), op)) or own.fill_(len(asked) > 1))
    saved = stopped(tmp_path / 'work', 99, hooks=[HOOKS[0], dict(type='StopHook', interval=2)])
    assert saved['meta']['iter'] == 4 and asked == [(0, 'max')] * 2
    with pytest.raises(ValueError, match='StopHook: interval=0: expected a positive integer'):
        stop.StopHook(interval=0)


def test_epochs_without_exact_resume_are_not_saved(tmp_path):
    assert stopped(tmp_path / 'work', 1, hooks=HOOKS[1:]) is None


class Slow(list):
    def __getitem__(self, index):
        time.sleep(0.5)
        return os.getpid()


def test_workers_survive_signals():
    loader = torch.utils.data.DataLoader(Slow('ab'), num_workers=1)
    shield_workers(loader)
    shield_workers(loader)
    batches = iter(loader)
    pid = int(next(batches))
    for number in (signal.SIGINT, *stop.SIGNALS):
        os.kill(pid, number)
    assert int(next(batches)) == pid


def test_workers_end_with_the_run():
    """Also in the middle of an epoch."""
    code = 'from torch.utils.data import DataLoader; from mmlinattn.engine.hooks import stop\n'
    code += 'loader = DataLoader([0] * 8, num_workers=1); stop.shield_workers(loader); next(batches := iter(loader))'
    subprocess.run([sys.executable, '-c', code], check=True, timeout=200)


@pytest.mark.parametrize(('on_averages', 'on_origin', 'skip'), [(True, False, 0), (False, True, 0), (True, True, 3)])
def test_averaged_weights_are_swapped_back_only_if_they_were_swapped(tmp_path, on_averages, on_origin, skip):
    """MMPretrain's hook validates the averages, the weights, or one after the other, each on three batches."""
    hooks = pytest.importorskip('mmpretrain.engine.hooks')
    averages = [*HOOKS, hooks.EMAHook(evaluate_on_ema=on_averages, evaluate_on_origin=on_origin)]
    cfg = dict(by_epoch=True, max_epochs=2, val_interval=2)
    saved = stopped(tmp_path / 'work', 6, 'val', skip, hooks=averages, train_cfg=cfg, **validation())
    epoch = torch.load(tmp_path / 'work/epoch_2.pth', weights_only=False)
    assert all(torch.equal(value, epoch['state_dict'][key]) for key, value in saved['state_dict'].items())


def test_several_optimizers_accumulate():
    sgd = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01) for _ in range(2)]
    one, two = (OptimWrapper(each, accumulative_counts=3) for each in sgd)
    hook, ended = stop.StopHook(), []
    hook._save_and_exit = lambda runner, iteration: ended.append(iteration)
    hook._previous, hook.is_signalled = {signal.SIGTERM: signal.SIG_DFL}, True
    for count in (1, 2, 3):
        for each in (one, two):
            each._inner_count, each._max_counts = count, 9
        hook.after_train_iter(SimpleNamespace(iter=count, optim_wrapper=OptimWrapperDict(one=one, two=two)), 0)
    assert ended == [4]


@pytest.mark.parametrize('rank', [0, 1])
def test_a_signal_to_one_process_in_a_validation(tmp_path, monkeypatch, rank):
    """The first process saves, others ask it and wait: the end of one of them would end it."""
    store = torch.distributed.HashStore()
    store.set(stop.STOP if rank == 0 else stop.SAVING, '1')
    store.set(*((stop.SAVED, '1') if rank else ('unused', '1')))
    made = make_runner(tmp_path / 'work', HOOKS, **validation())
    hook = next(hook for hook in made.hooks if isinstance(hook, stop.StopHook))
    settings = dict(get_world_size=lambda: 2, get_rank=lambda: rank, default_store=lambda: store, barrier=None)
    for name, value in settings.items():  # the others are in the validation, at no barrier
        monkeypatch.setattr(stop, name, value)
    hook._previous, hook.is_signalled, saved = {signal.SIGTERM: signal.SIG_DFL}, rank == 1, []
    hook._save = lambda runner, meta: saved.append(meta) or 'stopped.pth'
    for each in made.hooks:
        vars(each).update(batches=[])
    hook.before_val(made)
    with pytest.raises(SystemExit):
        hook.before_val_iter(made, 0)
    assert len(saved) == (rank == 0) and store.check([stop.STOP, stop.SAVED])
