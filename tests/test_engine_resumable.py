# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What of a checkpoint is refused before MMEngine takes it over; whole files are in tests/security."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn

from mmlinattn.engine.resumable import check_optimizers, check_resumable
from mmlinattn.utils.errors import CheckpointError

SCHEDULE = dict(
    base_values=[0.1], last_step=3, by_epoch=True, end=math.pi, anneal_func=OneCycleParamScheduler._annealing_cos
)
GOOD = dict(
    meta=dict(epoch=2, iter=6, seed=2**32 - 1),
    message_hub=dict(
        log_scalars=dict(loss=HistoryBuffer([1.0], [1]), other='of another kind'),
        runtime_info=dict(
            best_score=0.5, best_score_acc=torch.tensor(0.5), best_score_loss=np.float32(0.7), name='anything'
        ),
        resumed_keys=dict(loss=True, other=False),
    ),
    param_schedulers=[SCHEDULE, dict(best=math.inf, rule_worse=-math.inf, name=None)],
    optimizer=dict(),
)


def runner(loop=None, **attributes):
    """A run whose loop has no more than the numbers asked for."""
    if loop is None:
        return SimpleNamespace(train_loop=None)
    made = loop.__new__(loop)
    for name, value in attributes.items():
        setattr(made, f'_{name}', value)
    return SimpleNamespace(train_loop=made)


def changed(path, value):
    checkpoint = copy.deepcopy(GOOD)
    *parents, last = path.split('.')
    node = checkpoint
    for key in parents:
        node = node[int(key) if isinstance(node, list) else key]
    node[last] = value
    return checkpoint


@pytest.mark.parametrize('given', ['list', 'by name'])
def test_a_whole_checkpoint_is_taken(given):
    checkpoint = copy.deepcopy(GOOD)
    if given == 'by name':
        checkpoint['param_schedulers'] = dict(generator=[SCHEDULE], discriminator=[SCHEDULE])
    check_resumable(runner(), checkpoint, 'a.pth')
    del checkpoint['param_schedulers'], checkpoint['optimizer']
    for seed in (0, None):
        checkpoint['meta']['seed'] = seed
        check_resumable(runner(), checkpoint, 'a.pth')


def test_all_that_schedules_keep_is_taken():
    """Texts, tuples, and the two functions of OneCycleParamScheduler."""
    linear = OneCycleParamScheduler._annealing_linear
    for value in ('lr', '', (1, 2.5), [(0, None)], dict(a=dict(b='c')), True, linear, torch.tensor(0.5)):
        check_resumable(runner(), changed('param_schedulers.0.value', value), 'a.pth')
    for key in ('best', 'rule_worse'):  # infinite before the first value; anything else is finite
        for value in (math.nan, [math.inf]):
            check_resumable(runner(), changed(f'param_schedulers.0.{key}', value), 'a.pth')
    with pytest.raises(CheckpointError, match='param_schedulers.rule = inf is no finite number'):
        check_resumable(runner(), changed('param_schedulers.0.rule', math.inf), 'a.pth')


def test_of_long_values_the_beginning_is_quoted():
    for path, what in (
        ('meta.epoch', 'meta.epoch = {} is no count'),
        ('meta.seed', 'meta.seed = {} is no seed'),
        ('message_hub.runtime_info.best_score', 'message_hub.runtime_info.best_score = {} is no number'),
        ('message_hub.resumed_keys.loss', 'message_hub.resumed_keys.loss = {} is neither True nor False'),
    ):
        with pytest.raises(CheckpointError) as found:
            check_resumable(runner(), changed(path, 300 * 'x'), 'a.pth')
        quoted = what.format("'" + 79 * 'x')
        hint = 'It can be loaded without its state: --cfg-options load_from=FILE, without --resume'
        assert str(found.value) == f'a.pth cannot be resumed from: {quoted}. {hint}'


class Nothing(HistoryBuffer):
    """A log buffer of another kind."""


EMPTY = HistoryBuffer.__new__(HistoryBuffer)


@pytest.mark.parametrize(
    'path, value, message',
    [
        ('meta', None, 'it has no meta'),
        ('meta.epoch', -1, 'meta.epoch = -1 is no count'),
        ('meta.epoch', 1.0, 'meta.epoch = 1.0 is no count'),
        ('meta.iter', None, 'meta.iter = None is no count'),
        ('meta.iter', True, 'meta.iter = True is no count'),
        ('meta.seed', -1, 'meta.seed = -1 is no seed'),
        ('meta.seed', 2**32, 'meta.seed = 4294967296 is no seed'),
        ('meta.seed', '1', "meta.seed = '1' is no seed"),
        ('message_hub', None, 'it has no message_hub'),
        ('message_hub.log_scalars', None, 'message_hub.log_scalars is no dict'),
        ('message_hub.runtime_info', [], 'message_hub.runtime_info is no dict'),
        ('message_hub.resumed_keys', 1, 'message_hub.resumed_keys is no dict'),
        (
            'message_hub.log_scalars.loss',
            EMPTY,
            'log scalar loss is an empty log buffer',
        ),
        ('message_hub.log_scalars.loss', Nothing([1.0], [1]), 'log scalar loss is an empty log buffer'),
        ('message_hub.runtime_info.best_score', 'high', "message_hub.runtime_info.best_score = 'high' is no number"),
        ('message_hub.runtime_info.best_score_acc', torch.zeros(2), 'message_hub.runtime_info.best_score_acc = '),
        ('message_hub.resumed_keys.loss', 1, 'message_hub.resumed_keys.loss = 1 is neither True nor False'),
        ('param_schedulers', 3, 'param_schedulers is no list'),
        ('param_schedulers', [3], 'an entry of param_schedulers is no dict'),
        ('param_schedulers.0.step', 1, "param_schedulers has an entry 'step'"),
        ('param_schedulers.0.last_step', math.nan, 'param_schedulers.last_step = nan is no finite number'),
        ('param_schedulers.0.base_values', [0.1, math.inf], 'param_schedulers.base_values = '),
        ('param_schedulers.0.table', dict(a=[math.inf]), 'param_schedulers.table = '),
        ('param_schedulers.0.anneal_func', print, 'param_schedulers.anneal_func = '),
        ('optimizer', [], 'optimizer is no dict'),
    ],
)
def test_what_cannot_be(path, value, message):
    with pytest.raises(CheckpointError) as found:
        check_resumable(runner(), changed(path, value), 'a.pth')
    assert str(found.value).startswith(f'a.pth cannot be resumed from: {message}')
    assert str(found.value).endswith('--cfg-options load_from=FILE, without --resume')


EPOCHS = dict(loop=EpochBasedTrainLoop)
ITERS = dict(loop=IterBasedTrainLoop)


@pytest.mark.parametrize(
    'loop, message',
    [
        (dict(EPOCHS, max_epochs=2, max_iters=5), None),  # fewer batches an epoch than the saved run had
        (dict(EPOCHS, max_epochs=1, max_iters=6), r'it is at epoch 2, and this run ends at 1 \(max_epochs\)'),
        (dict(ITERS, max_epochs=1, max_iters=6), None),
        (dict(ITERS, max_epochs=1, max_iters=5), r'it is at iter 6, and this run ends at 5 \(max_iters\)'),
    ],
)
def test_a_run_that_has_ended_does_not_go_on(loop, message):
    if message is None:
        check_resumable(runner(**loop), GOOD, 'a.pth')
    else:
        with pytest.raises(CheckpointError, match=message):
            check_resumable(runner(**loop), GOOD, 'a.pth')


def stepped(**settings):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def in_runner(optimizer, by_name=False):
    wrapper = OptimWrapper(optimizer)
    return SimpleNamespace(
        optim_wrapper=OptimWrapperDict(good=OptimWrapper(stepped()), last=wrapper) if by_name else wrapper
    )


@pytest.mark.parametrize('by_name', [False, True])
@pytest.mark.parametrize(
    'change, message',
    [
        (lambda o: o.param_groups[0].update(lr=math.nan), 'the optimizer has lr = nan'),
        (lambda o: o.param_groups[0].update(lr='0.1'), "the optimizer has lr = '0.1'"),
        (lambda o: o.param_groups[0].update(betas=(0.9,)), r'the optimizer has betas = \(0.9,\)'),
        (lambda o: o.param_groups[0].update(betas=(0.9, math.inf)), 'the optimizer has betas = '),
        (lambda o: o.param_groups[0].update(betas=(0.9, 0.99, 0.5)), r'the optimizer has betas = \(0.9, 0.99, 0.5\)'),
        (lambda o: o.param_groups[0].update(betas=0.9), 'the optimizer has betas = 0.9'),
        (
            lambda o: o.add_param_group(dict(params=[nn.Parameter(torch.ones(1))], weight_decay=math.inf)),
            'the optimizer has weight_decay = inf',
        ),
        (lambda o: o.param_groups[0].update(amsgrad=1), 'the optimizer has amsgrad = 1'),
        (
            lambda o: o.state.update({o.param_groups[0]['params'][0]: 3}),
            "the optimizer's state of parameter 0 is no dict",
        ),
        (
            lambda o: o.state[o.param_groups[0]['params'][1]].update(exp_avg=torch.zeros(3)),
            r"the optimizer's exp_avg of parameter 1 has shape \(3,\), not \(2,\)",
        ),
        (
            lambda o: o.state[o.param_groups[0]['params'][1]].update(exp_avg_sq=torch.tensor([0.0, math.inf])),
            "the optimizer's exp_avg_sq of parameter 1 is not finite",
        ),
        (  # also beside steps that are no tensor, as older versions of PyTorch count them
            lambda o: o.state.update({o.param_groups[0]['params'][1]: dict(step=3, exp_avg=torch.zeros(3))}),
            r"the optimizer's exp_avg of parameter 1 has shape \(3,\), not \(2,\)",
        ),
        (
            lambda o: o.state[o.param_groups[0]['params'][0]].update(step=torch.tensor(math.nan)),
            "the optimizer's step of parameter 0 is not finite",
        ),
    ],
)
def test_state_of_an_optimizer(by_name, change, message):
    optimizer = stepped()
    check_optimizers(in_runner(optimizer, by_name), 'a.pth')
    change(optimizer)
    with pytest.raises(CheckpointError, match=f'a.pth cannot be resumed from: {message}'):
        check_optimizers(in_runner(optimizer, by_name), 'a.pth')


@pytest.mark.parametrize(
    'name', 'momentum_buffer exp_avg exp_avg_sq max_exp_avg_sq square_avg sum acc_delta of_others'.split()
)
def test_shapes_of_what_optimizers_keep(name):
    optimizer = stepped()
    weight, bias = optimizer.param_groups[0]['params']
    optimizer.state[weight][name], optimizer.state[bias][name] = torch.zeros(2, 3), torch.zeros(2)
    check_optimizers(in_runner(optimizer), 'a.pth')
    optimizer.state[weight][name] = torch.zeros(3, 2)
    if name == 'of_others':
        check_optimizers(in_runner(optimizer), 'a.pth')
    else:
        with pytest.raises(CheckpointError) as found:
            check_optimizers(in_runner(optimizer), 'a.pth')
        assert str(found.value) == (
            f"a.pth cannot be resumed from: the optimizer's {name} of parameter 0 has shape (3, 2), not (2, 3)"
        )
    optimizer.state[weight][name] = torch.zeros(2, 3, device='meta')
    with pytest.raises(CheckpointError, match=f"the optimizer's {name} of parameter 0 is not finite"):
        check_optimizers(in_runner(optimizer), 'a.pth')


def test_settings_in_words_and_entries_without_a_name():
    optimizer = stepped()
    optimizer.defaults['mode'] = optimizer.param_groups[0]['mode'] = 'fast'
    check_optimizers(in_runner(optimizer), 'a.pth')
    for value in (None, 3):
        optimizer.param_groups[0]['mode'] = value
        with pytest.raises(CheckpointError, match=f'the optimizer has mode = {value}$'):
            check_optimizers(in_runner(optimizer), 'a.pth')
    del optimizer.param_groups[0]['mode'], optimizer.param_groups[0]['lr']
    with pytest.raises(CheckpointError, match='the optimizer has lr = None$'):
        check_optimizers(in_runner(optimizer), 'a.pth')
    checkpoint = copy.deepcopy(GOOD)
    checkpoint['param_schedulers'] = dict(first=[SCHEDULE], last=[SCHEDULE, {3: 1}])
    with pytest.raises(CheckpointError, match='param_schedulers has an entry 3. It can be'):
        check_resumable(runner(), checkpoint, 'a.pth')
    checkpoint = changed('message_hub.runtime_info.best_score', torch.ones((), device='meta'))
    with pytest.raises(CheckpointError, match='message_hub.runtime_info.best_score = .* is no number'):
        check_resumable(runner(), checkpoint, 'a.pth')


@pytest.mark.parametrize('change', [dict(amsgrad=None), dict(foreach=True), dict(betas=[0.5, 0.9]), dict(lr=1)])
def test_settings_that_may_stand_for_each_other(change):
    optimizer = stepped()
    optimizer.param_groups[0].update(change)
    check_optimizers(in_runner(optimizer), 'a.pth')
