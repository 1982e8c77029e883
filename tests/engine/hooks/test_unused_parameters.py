# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The hook that names parameters without gradient."""

from functools import partial

import pytest
from engine_toys import SkippingModel, make_runner
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError
from mmlinattn.engine.hooks.unused_parameters import read_outputs

NAMES = '2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, backbone.out_norms.0.bias. '
READ = (
    'What follows the backbone does not read all of its maps: set model.backbone.out_indices=(1, 3), the in_channels '
    'of the neck or heads to these maps, and start_level=0 or in_index to match. '
)
WARNING = 'They are not trained, and distributed training would stop here.'


def freeze(model):
    model.backbone.out_norms['0'].requires_grad_(False)
    return model


def extend(model):
    model.unread = nn.Linear(1, 1)
    return freeze(model)


def warnings_of(folder, prepare=lambda model: model, times=1, **model):
    """What the hook warns of in a run, after ``prepare`` did something to the model."""
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


def test_names_parameters_and_outputs_once_a_training(tmp_path):
    assert warnings_of(tmp_path, times=2) == [f'{NAMES}{READ}{WARNING}'] * 2
    assert warnings_of(tmp_path, extend) == [
        f'2 parameters got no gradient in the first iteration: unread.weight, unread.bias. {WARNING}'
    ]


def test_says_nothing_where_all_are_trained(tmp_path):
    assert warnings_of(tmp_path, skips=False) == []
    assert warnings_of(tmp_path, freeze) == []


def test_outputs_that_are_read():
    model = SkippingModel()
    assert read_outputs(model, ['backbone.out_norms.3.bias', 'head.weight']) == (0, 1)
    assert read_outputs(model, ['a_backbone.out_norms.0.bias', 'backbone.out_normss.0.bias']) is None  # of others
    assert read_outputs(model, [f'backbone.out_norms.{i}.bias' for i in (0, 1, 3)]) is None
    detector = nn.Module()
    detector.a_backbone, detector.detector = nn.Module(), model
    detector.a_backbone.out_indices = (0, 2)  # of another, that comes first
    assert read_outputs(detector, ['detector.backbone.out_norms.0.bias']) == (1, 3)


def test_distributed_training_stops_or_is_told_to_search(tmp_path, one_process):
    with pytest.raises(RunError) as found:
        warnings_of(tmp_path, CPUDistributedDataParallel)
    assert str(found.value) == (
        f'{NAMES}{READ}Distributed training stops at such parameters; find_unused_parameters=True lets them be, '
        'at the price of a search in each iteration.'
    )
    assert warnings_of(tmp_path, CPUDistributedDataParallel, skips=False) == []
    searching = partial(CPUDistributedDataParallel, find_unused_parameters=True)
    assert warnings_of(tmp_path, searching) == [f'{NAMES}{READ}{WARNING}']
