# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a config to a Runner."""

import os

import pytest
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import RUNNERS

from mmlinattn.apis import running
from mmlinattn.utils.errors import RunError

AMP = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='bfloat16', use_fsdp=False)
APEX = dict(type='ApexOptimWrapper', opt_level='O1', loss_scale='dynamic', num_losses=2)
SWITCHED = dict(type='AmpOptimWrapper', loss_scale='dynamic')


@pytest.mark.parametrize('device, why', [('cpu', 'no accelerator'), ('mps', 'mps is no device of AmpOptimWrapper')])
@pytest.mark.parametrize(
    'kind', ['AmpOptimWrapper', 'mmengine.optim.AmpOptimWrapper', AmpOptimWrapper, 'Apex'], ids=str
)
def test_mixed_precision_leaves_nothing_behind_where_there_is_none(monkeypatch, capsys, kind, device, why):
    """None of its arguments, which the plain wrapper does not take."""
    monkeypatch.setattr(running, 'get_device', lambda: device)
    wrapper = APEX if kind == 'Apex' else dict(AMP, type=kind)
    for is_asked in (False, True):
        cfg = Config(dict(optim_wrapper=dict(wrapper, clip_grad=None)))
        running.drop_amp_on_cpu(cfg, is_asked)
        assert cfg.optim_wrapper == dict(type='OptimWrapper', clip_grad=None)
        assert capsys.readouterr().err == f'notice: {why}: mixed precision is off, training in fp32.\n'


@pytest.mark.parametrize(
    ('wrapper', 'device', 'is_asked', 'expected'),
    [
        (dict(type=OptimWrapper), 'cuda', True, SWITCHED),
        (dict(type='mmengine.OptimWrapper'), 'cuda', True, SWITCHED),
        ({}, 'cuda', True, {}),
        (dict(loss_scale=512.0), 'cuda', True, dict(type='AmpOptimWrapper', loss_scale=512.0)),
        (dict(loss_scale=512.0), 'cuda', False, dict(loss_scale=512.0)),
        (AMP, 'cuda', True, AMP),
        (dict(type='OptimWrapper'), 'cpu', False, dict(type='OptimWrapper')),
    ],
    ids=str,
)
def test_mixed_precision_where_it_is_asked_for(monkeypatch, capsys, wrapper, device, is_asked, expected):
    monkeypatch.setattr(running, 'get_device', lambda: device)
    cfg = Config(dict(optim_wrapper=wrapper))
    running.drop_amp_on_cpu(cfg, is_asked)
    assert cfg.optim_wrapper == expected and capsys.readouterr().err == ''


def test_mixed_precision_of_other_wrappers(monkeypatch):
    monkeypatch.setattr(running, 'get_device', lambda: 'cuda')
    with pytest.raises(RunError, match=r"^--amp: optim_wrapper.type is 'Mine'; only 'OptimWrapper' can be switched.$"):
        running.drop_amp_on_cpu(Config(dict(optim_wrapper=dict(type='Mine'))), is_asked=True)


@pytest.mark.parametrize('hooks', [None, [], [dict(type='A')], [dict(type='mmlinattn.engine.CheckpointMatchHook')]])
def test_weights_are_always_compared_with_the_model(hooks):
    cfg = Config(dict(custom_hooks=hooks))
    running.check_match(cfg)
    names = [hook.type.rpartition('.')[2] for hook in cfg.custom_hooks]
    assert names.count('CheckpointMatchHook') == 1 and len(names) == max(
        1, len(hooks or []) + (hooks == [dict(type='A')])
    )


def test_a_runner_of_the_config_s_own():
    @RUNNERS.register_module(force=True)
    class TestRunner:
        @classmethod
        def from_cfg(cls, cfg):
            return cfg.get('custom_hooks')

    cfg = dict(runner_type='TestRunner', launcher='none')
    assert running.build_runner(Config(cfg)) is None
    hooks = [dict(type='A')]
    assert running.build_runner(Config(dict(cfg, custom_hooks=hooks)), True) == [*hooks, dict(type='CompileHook')]


@pytest.mark.parametrize(
    ('count', 'launched', 'pointer', 'expected'),
    [
        ('1', 0, 100, True),
        ('2', 101, 100, True),  # file systems round down
        ('1', 200, 100, False),  # of a run before
        ('1', 0, None, False),
        ('0', 0, 100, False),
        (None, 0, 100, False),
        ('1', None, 100, False),
    ],
)
def test_a_process_that_torchrun_started_anew_goes_on(tmp_path, monkeypatch, count, launched, pointer, expected):
    """From a checkpoint written since ``tools/launch.py`` began."""
    for name, value in dict(TORCHELASTIC_RESTART_COUNT=count, MMLINATTN_LAUNCHED=launched).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, str(value))
    if pointer is not None:
        (tmp_path / 'last_checkpoint').touch()
        os.utime(tmp_path / 'last_checkpoint', (pointer, pointer))
    assert running.was_restarted(str(tmp_path)) is expected
