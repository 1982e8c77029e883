# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a config to a Runner."""

import logging
import subprocess

import pytest
import torch
from helpers.engine_toys import make_runner, refused
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import RUNNERS

from mmlinattn.engine import hooks as engine_hooks
from mmlinattn.tooling import running

AMP = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='bfloat16', use_fsdp=False)
PLAIN = dict(type='OptimWrapper', clip_grad=None)
BF16 = dict(type='AmpOptimWrapper', dtype='bfloat16', loss_scale=dict(enabled=False))
FP16 = dict(type='AmpOptimWrapper', loss_scale='dynamic')
SAID = {
    'cpu': 'notice: no accelerator: mixed precision is off, training in fp32.\n',
    'mps': 'notice: mps is no device of AmpOptimWrapper: mixed precision is off, training in fp32.\n',
    'bf16': 'bfloat16 without loss scaling',
    'fp16': 'float16 with loss scaling',
    'scaled bf16': 'bfloat16 with loss scaling',
    'fp32': 'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1',
    'tf32': 'uses TF32',
    'nothing': '',
}


@pytest.mark.parametrize(
    ('device', 'wrapper', 'is_asked', 'expected', 'said'),
    [
        # the plain wrapper does not take the arguments of the others
        ('cpu', dict(AMP, clip_grad=None), False, PLAIN, 'cpu'),
        ('mps', dict(AMP, clip_grad=None), False, PLAIN, 'mps'),
        ('cpu', PLAIN, True, PLAIN, 'cpu'),
        ('cpu', PLAIN, False, PLAIN, 'nothing'),
        # GPUs by their capability
        ((9, 0), dict(type=OptimWrapper), True, BF16, 'bf16'),
        ((7, 5), dict(type=OptimWrapper), True, FP16, 'fp16'),
        ((7, 5), dict(loss_scale=512.0), True, dict(FP16, loss_scale=512.0), 'fp16'),
        ((8, 0), dict(dtype='float16'), True, dict(FP16, dtype='float16'), 'fp16'),  # set in the config
        ((8, 0), AMP, True, AMP, 'scaled bf16'),
        ((8, 0), AMP, False, AMP, 'scaled bf16'),
        ((8, 0), PLAIN, False, PLAIN, 'fp32'),
        ((8, 0), PLAIN, False, PLAIN, 'tf32'),
        ((7, 5), PLAIN, False, PLAIN, 'nothing'),
        ((8, 0), {}, True, {}, 'nothing'),
    ],
)
def test_precision_of_a_device(monkeypatch, capsys, device, wrapper, is_asked, expected, said):
    is_gpu = isinstance(device, tuple)
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda' if is_gpu else device)
    monkeypatch.setattr('torch.cuda.is_available', lambda: is_gpu)
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda: device)
    monkeypatch.setattr('torch.get_float32_matmul_precision', lambda: 'high' if said == 'tf32' else 'highest')
    cfg = Config(dict(optim_wrapper=wrapper))
    running.set_precision(cfg, is_asked)
    assert cfg.optim_wrapper == expected
    line = capsys.readouterr().err
    assert SAID[said] in line and bool(line) == bool(SAID[said])


def test_amp_refuses_other_wrappers(monkeypatch):
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    with refused("--amp: optim_wrapper.type='ApexOptimWrapper': expected 'OptimWrapper' or 'Amp"):
        running.set_precision(Config(dict(optim_wrapper=dict(type='ApexOptimWrapper'))), True)


@pytest.mark.parametrize('hooks', [None, [dict(type='A')], [dict(type='mmlinattn.engine.CheckpointMatchHook')]])
def test_hooks_of_the_tools_are_added_once(hooks):
    cfg = Config(dict(custom_hooks=hooks))
    for _ in range(2):
        running.add_checks(cfg)
        names = [hook.type.rpartition('.')[2] for hook in cfg.custom_hooks]
        own = {*engine_hooks.__all__} - {'CompileHook', 'SafeCheckpointHook'}  # of --compile; in place of MMEngine's
        assert sorted(names) == sorted([*['A'] * (hooks == [dict(type='A')]), *own])


@pytest.mark.parametrize(('is_on', 'lr', 'said'), [(True, 0.5, 'rate x 0.5: 8 im'), (False, 1.0, 'is for 16 im')])
@pytest.mark.parametrize('several', [False, True])
def test_the_rate_is_scaled_by_the_images_of_an_update(capsys, is_on, lr, said, several):
    """Two images on one process, four of them accumulated; of one optimizer or several."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    wrapper = OptimWrapper(optimizer, accumulative_counts=4)
    runner = object.__new__(running.ToolRunner)
    runner._train_dataloader, runner._world_size, runner.param_schedulers = dict(batch_size=2), 1, None
    runner.logger = logging.getLogger()
    wrapper = OptimWrapperDict(one=wrapper) if several else wrapper
    runner.scale_lr(wrapper, dict(enable=is_on, base_batch_size=16))
    assert optimizer.param_groups[0]['lr'] == lr
    assert said in capsys.readouterr().err


def schedules():
    return [
        dict(type='LinearLR', start_factor=0.01, by_epoch=True, begin=0, end=5, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', T_max=295, by_epoch=True, begin=5, end=300),
        dict(type='MultiStepLR', milestones=[200, 250]),
        dict(type='LinearLR', by_epoch=False, begin=0, end=500),
    ]


@pytest.mark.parametrize(
    ('epochs', 'expected'),
    [
        (6, [dict(end=1), dict(begin=1, end=6, T_max=5), dict(milestones=[4, 5]), dict(end=10)]),
        (1, [dict(end=1), dict(begin=0, end=1, T_max=1), dict(milestones=[]), dict(end=2)]),
        (600, [dict(end=10), dict(begin=10, end=600, T_max=590), dict(milestones=[400, 500]), {}]),
    ],
)
def test_a_schedule_follows_the_length_that_the_command_line_gives(capsys, epochs, expected):
    options = {'train_cfg.max_epochs': epochs}
    cfg = Config(dict(train_cfg=dict(max_epochs=epochs), param_scheduler=schedules()))
    running.fit_schedule(cfg, dict(max_epochs=300), options)
    assert cfg.param_scheduler == [dict(old, **new) for old, new in zip(schedules(), expected)]
    assert f'fitted to train_cfg.max_epochs={epochs} (it was made for 300)' in capsys.readouterr().err


def test_other_schedules(capsys):
    """Keep a schedule that the user sets; fit one that is longer than the training of the config from its end."""
    for options in ({}, {'train_cfg.max_epochs': 6, 'param_scheduler.0.end': 2}):
        cfg = Config(dict(train_cfg=dict(max_epochs=6), param_scheduler=schedules()))
        running.fit_schedule(cfg, dict(max_epochs=300), options)
        assert cfg.param_scheduler == schedules() and not capsys.readouterr().err
    cfg = Config(dict(train_cfg=dict(max_iters=40), param_scheduler=[dict(type='PolyLR', end=800, by_epoch=False)]))
    running.fit_schedule(cfg, dict(max_iters=6), {'train_cfg.max_iters': 40})
    assert cfg.param_scheduler[0].end == 40


def test_runners_of_the_tools_and_of_the_config(monkeypatch):
    monkeypatch.setattr(running.ToolRunner, 'from_cfg', classmethod(lambda cls, cfg: cls))
    for given in ({}, dict(runner_type='SafeRunner')):
        assert running.build_runner(Config(dict(given, launcher='none'))) is running.ToolRunner
    assert issubclass(running.ToolRunner, running.SafeRunner)

    @RUNNERS.register_module(force=True)
    class TestRunner:
        @classmethod
        def from_cfg(cls, cfg):
            return cfg.get('custom_hooks')

    cfg = dict(runner_type='TestRunner', launcher='none')
    assert running.build_runner(Config(cfg)) is None
    hooks = [dict(type='A')]
    for _ in range(2):  # also a config with the hook of its own
        hooks = running.build_runner(Config(dict(cfg, custom_hooks=hooks)), True)
        assert hooks == [dict(type='A'), dict(type='CompileHook')]


def test_a_batch_larger_than_the_data_is_refused(tmp_path):
    loader = dict(dataset=dict(type='ToyDataset', size=3), drop_last=True)
    schedule = dict(type='LinearLR', end=1, convert_to_iter_based=True)
    runner = make_runner(tmp_path, [], loader=loader, param_scheduler=schedule, kind=running.ToolRunner)
    with refused('batch_size=4 exceeds the 3 images of the data set, and drop_last=True'):
        runner.train()


def test_two_runs_in_one_work_dir(tmp_path):
    def run(*hooks):
        make_runner(tmp_path, list(hooks), kind=running.ToolRunner).train()

    class Second(Hook):
        def before_train_epoch(self, runner):
            with refused('another run trains in it. Set another folder.'):
                run()

    run(Second())
    run()  # the lock ends with the training


def test_a_missing_compiler_says_nothing(monkeypatch, capfd):
    def log_env(self, env_cfg):
        subprocess.run('no-such-compiler --version', shell=True)

    monkeypatch.setattr(running.SafeRunner, '_log_env', log_env)
    object.__new__(running.ToolRunner)._log_env({})
    subprocess.run('echo later >&2', shell=True)
    assert capfd.readouterr().err == 'later\n'
