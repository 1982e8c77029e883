# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
from types import SimpleNamespace

import pytest
import torch
from helpers.engine_toys import make_runner
from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS

from mmlinattn.engine.hooks.schedule_check import ScheduleCheckHook, schedule_faults

WARM_UP = dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=500)
COSINE = dict(type='CosineAnnealingLR', eta_min=0, begin=5, end=300, T_max=295)


def built(*schedules):
    """Schedulers as a runner builds them for epochs of 100 iterations."""
    wrapper = OptimWrapper(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    default = dict(optimizer=wrapper, epoch_length=100)
    return [PARAM_SCHEDULERS.build(dict(schedule), default_args=default) for schedule in schedules]


@pytest.mark.parametrize(
    ('schedules', 'epochs', 'words'),
    [
        ([WARM_UP, COSINE], 300, []),
        (
            [WARM_UP, COSINE],
            6,
            ['warm-up of LinearLR lasts until iteration 500 of 600', 'CosineAnnealingLR falls until'],
        ),
        ([dict(COSINE, convert_to_iter_based=True)], 200, ['falls until iteration 30000, and the training ends at']),
        ([COSINE], 400, ['ends at epoch 300, and the training goes on at the last rate until epoch 400']),
        ([dict(COSINE, T_max=100)], 300, ['rises again after epoch 105 of 300 (T_max = 100)']),
        ([COSINE, dict(type='ConstantLR', factor=1.0, begin=300, end=400)], 400, []),
        ([dict(type='MultiStepLR', milestones=[8, 11], end=12)], 12, []),
        ([dict(type='MultiStepLR', milestones=[8, 11], end=12)], 10, ['has milestones [11], and the training ends at']),
        ([dict(type='PolyLR', power=0.9, end=50)], 12, ['PolyLR falls until epoch 50']),
        ([dict(type='ConstantLR', factor=0.1, end=7)], 12, ['warm-up of ConstantLR lasts until epoch 7 of 12']),
        ([dict(type='ExponentialLR', gamma=0.9)], 12, []),
        ([dict(type='CosineAnnealingMomentum', T_max=3, eta_min=0, end=3)], 12, []),
    ],
)
def test_schedules_of_another_length(schedules, epochs, words):
    faults = [*schedule_faults(built(*schedules), epochs, epochs * 100, False)]
    assert len(faults) == len(words) and all(word in fault for word, fault in zip(words, faults)), faults


def test_several_optimizers_and_a_loop_without_epochs():
    assert len([*schedule_faults(dict(a=built(COSINE), b=built(COSINE)), 6, 600, False)]) == 2
    (fault,) = schedule_faults(built(COSINE), 1, 600, True)
    assert fault.endswith('after epochs, and the iteration-based loop has none: set by_epoch=False.')


def warnings_of(runner, word):
    """Train; return the hook's warnings with their iterations."""
    said = []
    runner.logger.warning = lambda line: said.append((runner.iter, line))
    runner.train()
    return [(at, line) for at, line in said if word in line]


HOOKS = [dict(type='ScheduleCheckHook')]


@pytest.mark.parametrize('max_iters', [6, 20])
def test_faults_are_named_before_the_first_step(tmp_path, max_iters):
    schedule, loop = [dict(type='PolyLR', end=20, by_epoch=False)], dict(by_epoch=False, max_iters=max_iters)
    optim = dict(accumulative_counts=2)
    said = warnings_of(make_runner(tmp_path, HOOKS, loop, optim=optim, param_scheduler=schedule), 'schedule')
    assert all(at == 0 for at, _ in said)
    assert f'max_iters = {max_iters} iterations are {max_iters // 2} updates' in said[-1][1]
    assert len(said) == 1 + (max_iters == 6) and ('PolyLR falls until iteration 20' in said[0][1]) == (max_iters == 6)


def test_complete_trainings_and_missing_checkpoints_are_named(tmp_path):
    for checkpoint, line in (
        (None, 'no checkpoint will be written'),
        (dict(type='CheckpointHook', save_best='acc'), 'no best checkpoint'),
    ):
        assert warnings_of(make_runner(tmp_path, HOOKS, default_hooks=dict(checkpoint=checkpoint)), line)
    more = dict(load_from=str(tmp_path / 'epoch_2.pth'), resume=True)
    assert warnings_of(
        make_runner(tmp_path, HOOKS, **more), 'nothing is left to train: the checkpoint is at iteration 6'
    )


def test_other_processes_are_silent(monkeypatch):
    monkeypatch.setattr('mmlinattn.engine.hooks.schedule_check.is_main_process', lambda: False)
    ScheduleCheckHook().before_train(SimpleNamespace(logger=logging.getLogger()))
