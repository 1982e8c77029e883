# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.engine_toys import make_runner, refused, validation, warnings_of
from mmengine import registry
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS

from mmlinattn.engine.hooks.schedule_check import ScheduleCheckHook, check_custom_keys, schedule_errors

WARM_UP = dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=500)
COSINE = dict(type='CosineAnnealingLR', eta_min=0, begin=5, end=300, T_max=295)


def errors(schedules, epochs, rates=(1.0,), by_iteration=False, begin=0):
    """Errors of schedules, built for epochs of 100 iterations and a parameter of each rate above 0.

    The last group has the rate 1e-7 and no parameters, as MMEngine's base_param_settings.
    """
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(2))], lr=rate) for rate in rates]
    groups.append(dict(params=[], lr=1e-7))
    wrapper = OptimWrapper(torch.optim.SGD(groups, lr=max(rates), momentum=0.9))
    default = dict(optimizer=wrapper, epoch_length=100)
    built = [PARAM_SCHEDULERS.build(dict(schedule), default_args=default) for schedule in schedules]
    for each in built * (begin // 100):
        each.step()
    before = [dict(vars(each)) for each in built], [group['lr'] for group in wrapper.param_groups]
    found = [*schedule_errors(built, wrapper.param_groups, epochs * 100, 0 if by_iteration else 100, begin)]
    assert before == ([vars(each) for each in built], [group['lr'] for group in wrapper.param_groups])
    return found


@pytest.mark.parametrize(
    ('schedules', 'epochs', 'words'),
    [
        ([WARM_UP, COSINE], 300, []),
        (
            [WARM_UP, COSINE],
            6,
            ['warm-up of LinearLR lasts until iteration 499 of 600', 'CosineAnnealingLR changes the rate until'],
        ),
        ([WARM_UP], 3, ['the warm-up of LinearLR does not end: the last rate is 0.603 of 1.']),
        ([dict(COSINE, convert_to_iter_based=True)], 200, ['until iteration 30000, and the training ends at']),
        ([COSINE], 400, ['ends at epoch 300, and the training goes on at the last rate, 2.84e-05, until epoch 400']),
        ([dict(COSINE, T_max=100)], 300, ['rises again after epoch 105 of 300 (T_max = 100)']),
        ([COSINE, dict(type='ConstantLR', factor=1.0, begin=300, end=400)], 400, []),
        ([dict(type='MultiStepLR', milestones=[8, 11], end=12)], 12, []),
        ([dict(type='MultiStepLR', milestones=[8, 11], end=12)], 10, ['ends at epoch 10, with 0.1.']),
        ([dict(type='MultiStepLR', milestones=[8, 11])], 10, ['ends at epoch 10, with 0.1.']),
        ([dict(type='PolyLR', power=0.9, end=50)], 12, ['PolyLR changes the rate until epoch 50']),
        ([dict(type='ConstantLR', factor=0.1, end=8)], 12, ['warm-up of ConstantLR lasts until iteration 700 of 1200']),
        ([dict(type='ExponentialLR', gamma=0.9)], 12, []),
        ([dict(type='StepLR', step_size=3, gamma=2.0)], 12, ['the rate of 1 parameters rises above 1, to which']),
        ([dict(type='OneCycleLR', eta_max=1.0, total_steps=1200, by_epoch=False)], 12, []),
        ([dict(type='CosineRestartLR', periods=[6, 6], restart_weights=[1, 0.5], eta_min=0)], 12, []),
        ([dict(type='ReduceOnPlateauLR', monitor='acc')], 12, []),
        ([dict(type='CosineAnnealingMomentum', T_max=3, eta_min=0, end=3)], 12, []),
    ],
)
def test_played_schedules(schedules, epochs, words):
    found = errors(schedules, epochs)
    assert len(found) == len(words) and all(word in error for word, error in zip(words, found)), found


@pytest.mark.parametrize('rates', [(1.0, 0.0), (2e-6, 1e-6), (1.0, 1e-6, 1e-6), (1.0, 0.5)])
def test_a_floor_above_the_rate_of_a_group(rates):
    """eta_min counts for each group: also for frozen ones, and those of layer decay."""
    found = errors([dict(COSINE, eta_min=1e-5)], 300, rates)
    assert len(found) == (min(rates) < 1e-5)
    assert not found or f'the rate of {len(rates) - 1} parameters rises above' in found[0]
    assert not found or 'eta_min=1e-05 of CosineAnnealingLR is a floor' in found[0]


@pytest.mark.filterwarnings('ignore:Detected call of `scheduler.step')
def test_a_resumed_schedule_and_a_loop_without_epochs():
    assert not errors([COSINE], 300, begin=300 * 100)  # nothing is left to train
    for schedule in (COSINE, dict(COSINE, T_max=195, end=400), dict(COSINE, T_max=495, end=500)):  # ends, rises, lasts
        assert errors([schedule], 400, begin=250 * 100) == errors([schedule], 400) != []
    (error,) = errors([COSINE], 6, by_iteration=True)
    assert error.endswith('after epochs, and the iteration-based loop has none: set by_epoch=False.')
    assert not errors([dict(type='ReduceOnPlateauLR', monitor='acc')], 6, by_iteration=True)  # works by validations


@pytest.mark.parametrize(('settings', 'fails'), [(dict(lr_mult=0.1), True), (dict(decay_mult=0.0), False)])
def test_custom_keys_without_a_parameter(settings, fails):
    said = []
    config = dict(paramwise_cfg=dict(custom_keys={'0.': settings, 'weigth': settings}))
    line = "custom_keys: 'weigth' is in the name of no parameter. Did you mean 'weight'?"
    model, logger = torch.nn.Sequential(torch.nn.Linear(1, 1)), SimpleNamespace(warning=said.append)
    with refused(re.escape(line) if fails else ''):
        check_custom_keys(config, model, logger)
    assert len(said) == (not fails) and all(line in each for each in said)


HOOKS = [dict(type='ScheduleCheckHook')]
SAVE = dict(type='CheckpointHook', save_last=False)


@registry.HOOKS.register_module()
class LateHook(Hook):
    def __init__(self, switch_epoch):
        self.switch_epoch = switch_epoch


@pytest.mark.parametrize('max_iters', [6, 20])
def test_errors_are_named_before_the_first_step(tmp_path, max_iters):
    schedule, loop = [dict(type='PolyLR', end=20, by_epoch=False)], dict(by_epoch=False, max_iters=max_iters)
    optim = dict(accumulative_counts=2)
    *said, last = warnings_of(make_runner(tmp_path, HOOKS, loop, optim=optim, param_scheduler=schedule), 'schedule')
    assert f'max_iters = {max_iters} iterations are {max_iters // 2} updates' in last
    assert ['PolyLR changes the rate until iteration 20' in line for line in said] == [True] * (max_iters == 6)


def test_complete_trainings_and_missing_checkpoints_are_named(tmp_path):
    assert warnings_of(make_runner(tmp_path, HOOKS, default_hooks=dict(checkpoint=None)), 'no checkpoint will be writ')
    saves_last = dict(checkpoint=dict(SAVE, interval=1, save_begin=2))
    assert not warnings_of(make_runner(tmp_path, HOOKS, default_hooks=saves_last), 'no checkpoint')
    make_runner(tmp_path, []).train()
    more = dict(load_from=str(tmp_path / 'epoch_2.pth'), resume=True)
    runner = make_runner(tmp_path, HOOKS, default_hooks=dict(checkpoint=None), **more)
    (line,) = warnings_of(runner, 'checkpoint')  # that none will be written is no matter
    assert 'nothing is left to train: the checkpoint is at epoch 2 of 2' in line


@pytest.mark.parametrize(
    ('loop', 'settings', 'word'),
    [
        (dict(max_epochs=2), dict(param_scheduler=None), 'no hook steps param_scheduler'),
        (dict(max_epochs=2), dict(checkpoint=dict(SAVE, interval=3)), 'no checkpoint will be written: default_hooks'),
        (
            dict(max_epochs=2),
            dict(checkpoint=dict(SAVE, interval=-1, save_best='acc', rule='greater')),
            'no checkpoint to resume from will be written, only the best one: default_hooks',
        ),
        (dict(max_epochs=2), dict(checkpoint=dict(SAVE, interval=2)), ''),
        (dict(max_epochs=2, val_begin=3), {}, 'train_cfg.val_begin=3 is after the last epoch, 2'),
        (dict(by_epoch=False, max_iters=2, val_begin=3), {}, 'val_begin=3 is after the last iteration, 2'),
        (dict(max_epochs=2), dict(late=dict(type='EMAHook', begin_epoch=2)), ''),
        (dict(max_epochs=2), dict(late=dict(type='LateHook', switch_epoch=3)), 'LateHook.switch_epoch=3 is after'),
    ],
)
def test_settings_without_effect(tmp_path, loop, settings, word):
    loop, schedule = {'by_epoch': True, **loop}, dict(type='ConstantLR', factor=1.0)
    runner = make_runner(tmp_path, HOOKS, loop, default_hooks=settings, param_scheduler=schedule, **validation())
    assert bool(warnings_of(runner, word)) == bool(word)


@pytest.mark.parametrize(
    ('loop', 'schedule', 'said'),
    [
        (dict(val_interval=0), None, 'train_cfg.val_interval=0: expected an integer from 1 up'),
        ({}, dict(type='OneCycleLR', eta_max=1.0, total_steps=2, by_epoch=False), 'OneCycleLR fails after iteration'),
    ],
)
def test_settings_that_would_fail_later(tmp_path, loop, schedule, said):
    loop = dict(by_epoch=True, max_epochs=2, **loop)
    runner = make_runner(tmp_path, HOOKS, loop, param_scheduler=schedule, **validation())
    with refused(said):
        runner.train()
    assert runner.iter == 0


@pytest.mark.parametrize('by_epoch', [True, False])
def test_hooks_that_wait_for_epochs_in_a_loop_without(tmp_path, by_epoch):
    hooks = dict(
        checkpoint=dict(type='CheckpointHook', by_epoch=by_epoch, interval=2),
        logger=dict(type='LoggerHook', log_metric_by_epoch=by_epoch),
    )
    loop = dict(by_epoch=False, max_iters=4, val_interval=2)
    said = warnings_of(make_runner(tmp_path, HOOKS, loop, default_hooks=hooks, **validation()), 'Set it to False')
    assert len(said) == 2 * by_epoch


def test_other_processes_are_silent(monkeypatch):
    monkeypatch.setattr('mmlinattn.engine.hooks.schedule_check.is_main_process', lambda: False)
    ScheduleCheckHook().before_train(SimpleNamespace(logger=logging.getLogger()))
