# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The hook that names parameters without gradient."""

from functools import partial

import pytest
from helpers.engine_toys import make_runner
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError

NAMES = '2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, backbone.out_norms.0.bias. '
READ = (
    'Nothing reads the maps [0] of the backbone: leave them out of model.backbone.out_indices, '
    'and set in_channels and start_level=0 or in_index of the neck or heads to match. '
)
WARNING = 'They are not trained, and distributed training would stop here.'


def freeze(model):
    model.backbone.out_norms['0'].requires_grad_(False)
    return model


def extend(model):
    model.unread = nn.Linear(1, 1)
    return freeze(model)


def warnings_of(folder, prepare=lambda model: model, times=1, **model):
    """Run with the model that ``prepare`` returns; return the warnings of the hook."""
    runner = make_runner(folder, [dict(type='UnusedParametersHook')], model={'type': 'SkippingModel', **model})
    inner = runner.model
    runner.model = prepare(inner)
    lines = []
    runner.logger.warning = lines.append
    for _ in range(times):
        runner.train()
        runner._train_loop = dict(by_epoch=True, max_epochs=2)
    assert not any(parameter._backward_hooks for parameter in inner.parameters())
    return [line for line in lines if 'gradient' in line]


def test_parameters_and_maps_are_named_once(tmp_path):
    assert warnings_of(tmp_path, times=2) == [f'{NAMES}{READ}{WARNING}'] * 2
    assert warnings_of(tmp_path, extend) == [
        f'2 parameters got no gradient in the first iteration: unread.weight, unread.bias. {WARNING}'
    ]


def test_distributed_training_stops_or_searches(tmp_path, one_process):
    with pytest.raises(RunError) as found:
        warnings_of(tmp_path, CPUDistributedDataParallel)
    assert str(found.value) == (
        f'{NAMES}{READ}Distributed training stops at such parameters. find_unused_parameters=True accepts them, '
        'and searches in each iteration.'
    )
    assert warnings_of(tmp_path, CPUDistributedDataParallel, skips=False) == []
    searching = partial(CPUDistributedDataParallel, find_unused_parameters=True)
    static = partial(CPUDistributedDataParallel, static_graph=True)
    assert warnings_of(tmp_path, static) == [f'{NAMES}{READ}{WARNING}']
    assert warnings_of(tmp_path, searching) == [f'{NAMES}{READ}{WARNING}']
