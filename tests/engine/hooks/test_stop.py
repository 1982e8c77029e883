# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.engine_toys import make_runner, validation
from mmengine.hooks import Hook

from mmlinattn.engine.hooks import stop
from mmlinattn.engine.hooks.stop import shield_workers

HOOKS = [dict(type='ExactResumeHook'), dict(type='StopHook')]


class Kill(Hook):
    """SIGTERM to this process before an iteration of training, or of the validation there."""

    def __init__(self, iteration, mode='train'):
        self.iteration, self.mode = iteration, mode

    def _before_iter(self, runner, batch_idx, data_batch=None, mode='train'):
        if (runner.iter, mode) == (self.iteration, self.mode):
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder, kill, hooks=HOOKS, **options):
    runner = make_runner(folder, hooks, **options)
    runner.register_hook(kill, 'VERY_HIGH')
    with pytest.raises(SystemExit) as end:
        runner.train()
    assert end.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    found = list(folder.parent.glob('**/stopped.pth'))
    return torch.load(found[0], weights_only=False) if found else None


@pytest.mark.parametrize('by_epoch', [True, False])
def test_a_stopped_run_resumes_exactly(tmp_path, by_epoch):
    train_cfg = dict(by_epoch=True, max_epochs=3) if by_epoch else dict(type='IterBasedTrainLoop', max_iters=9)
    options = dict(train_cfg=train_cfg, randomness=dict(seed=1))
    if not by_epoch:
        options['loader'] = dict(sampler=dict(type='InfiniteSampler', shuffle=True))
    assert stopped(tmp_path / 'work', Kill(4), **options)['meta']['iter'] == 5
    path = (tmp_path / 'work/last_checkpoint').read_text()
    assert path == str(tmp_path / 'work/stopped.pth')
    resumed = make_runner(tmp_path / 'work', HOOKS, resume=True, load_from=path, **options)
    whole = make_runner(tmp_path / 'whole', HOOKS, **options)
    ours, theirs = (torch.cat([p.detach().flatten() for p in run.train().parameters()]) for run in (resumed, whole))
    assert resumed.iter == 9 and torch.equal(ours, theirs)


class Fork(Hook):
    """Fork processes, like pools of metrics, and end them."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            assert os.waitpid(pid, 0)[1] == signal.SIGTERM  # 0 after its sleep
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_forked_processes_end_at_a_sigterm(tmp_path):
    runner = make_runner(tmp_path, HOOKS, train_cfg=dict(by_epoch=True, max_epochs=1))
    runner.register_hook(Fork())
    runner.train()


def test_a_training_after_one_that_failed(tmp_path):
    failing = make_runner(tmp_path / 'first', HOOKS)
    failing.model.train_step = None
    with pytest.raises(TypeError):
        failing.train()
    assert stopped(tmp_path / 'second', Kill(4))['meta']['iter'] == 5


def test_in_a_validation_it_is_saved_at_once(tmp_path):
    """Save the weights, not their averages, beside the other checkpoints."""
    saved = stopped(
        tmp_path / 'work',
        Kill(6, 'val'),
        [*HOOKS, dict(type='EMAHook')],
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
    assert stopped(tmp_path / 'work', Kill(3), optim=dict(accumulative_counts=3))['meta']['iter'] == 6


def test_a_process_stops_with_another(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stop, 'get_world_size', lambda: 2)
    monkeypatch.setattr(stop, 'all_reduce', lambda own, op: asked.append((own.item(), op)) or own.fill_(len(asked) > 1))
    saved = stopped(tmp_path / 'work', Kill(99), [HOOKS[0], dict(type='StopHook', interval=2)])
    assert saved['meta']['iter'] == 4 and asked == [(0, 'max')] * 2
    with pytest.raises(ValueError, match='StopHook: interval=0: expected a positive integer'):
        stop.StopHook(interval=0)


def test_epochs_without_exact_resume_are_not_saved(tmp_path):
    assert stopped(tmp_path / 'work', Kill(1), HOOKS[1:]) is None


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
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert int(next(batches)) == pid


def test_workers_end_with_the_run():
    """The process does not wait for :data:`GRACE`, also in the middle of an epoch."""
    code = 'from torch.utils.data import DataLoader; from mmlinattn.engine.hooks import stop; stop.GRACE = 600\n'
    code += 'loader = DataLoader([0] * 8, num_workers=1); stop.shield_workers(loader); next(batches := iter(loader))'
    subprocess.run([sys.executable, '-c', code], check=True, timeout=200)
