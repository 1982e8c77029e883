# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a config to a Runner."""

import pytest
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import RUNNERS

from mmlinattn.tooling import running

AMP = dict(type='AmpOptimWrapper', loss_scale='dynamic', dtype='bfloat16', use_fsdp=False)
APEX = dict(type='ApexOptimWrapper', opt_level='O1', loss_scale='dynamic', num_losses=2)
PLAIN = dict(type='OptimWrapper', clip_grad=None)
OFF = ': mixed precision is off, training in fp32.'


@pytest.mark.parametrize(
    ('wrapper', 'device', 'is_asked', 'expected', 'said'),
    [
        # where there is none, none of its arguments stays, which the plain wrapper does not take
        (dict(AMP, clip_grad=None), 'cpu', False, PLAIN, f'no accelerator{OFF}'),
        (dict(APEX, clip_grad=None), 'mps', False, PLAIN, f'mps is no device of AmpOptimWrapper{OFF}'),
        (PLAIN, 'cpu', True, PLAIN, f'no accelerator{OFF}'),
        (PLAIN, 'cpu', False, PLAIN, None),
        (dict(type=OptimWrapper), 'cuda', True, dict(type='AmpOptimWrapper', loss_scale='dynamic'), None),
        (dict(loss_scale=512.0), 'cuda', True, dict(type='AmpOptimWrapper', loss_scale=512.0), None),
        (dict(loss_scale=512.0), 'cuda', False, dict(loss_scale=512.0), None),
        ({}, 'cuda', True, {}, None),
        (AMP, 'cuda', True, AMP, None),
    ],
)
def test_mixed_precision(monkeypatch, capsys, wrapper, device, is_asked, expected, said):
    monkeypatch.setattr(running, 'get_device', lambda: device)
    cfg = Config(dict(optim_wrapper=wrapper))
    running.drop_amp_on_cpu(cfg, is_asked)
    assert cfg.optim_wrapper == expected
    assert capsys.readouterr().err == (f'notice: {said}\n' if said else '')


@pytest.mark.parametrize('hooks', [None, [dict(type='A')], [dict(type='mmlinattn.engine.CheckpointMatchHook')]])
def test_data_and_weights_are_always_checked(hooks):
    cfg = Config(dict(custom_hooks=hooks))
    running.add_checks(cfg)
    names = [hook.type.rpartition('.')[2] for hook in cfg.custom_hooks]
    assert sorted(names) == ['A'] * (hooks == [dict(type='A')]) + ['CheckpointMatchHook', 'DataCheckHook']


def test_a_runner_of_the_config_s_own():
    @RUNNERS.register_module(force=True)
    class TestRunner:
        @classmethod
        def from_cfg(cls, cfg):
            return cfg.get('custom_hooks')

    cfg = dict(runner_type='TestRunner', launcher='none')
    assert running.build_runner(Config(cfg)) is None
    hooks = [dict(type='A')]
    for _ in range(2):  # also of a config that asks for it itself
        hooks = running.build_runner(Config(dict(cfg, custom_hooks=hooks)), True)
        assert hooks == [dict(type='A'), dict(type='CompileHook')]
