# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The hook that names parameters without gradient."""

import pytest
import torch
from engine_toys import SkippingModel, Wrapped, make_runner
from mmengine.model import MMFullyShardedDataParallel
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError
from mmlinattn.engine.hooks.unused_parameters import read_outputs
from mmlinattn.engine.runner.distributed import leave_process_group

NAMES = '2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, backbone.out_norms.0.bias. '
READ = (
    'What follows the backbone does not read all of its maps: set model.backbone.out_indices=(1, 3), the in_channels '
    'of the neck or heads to these maps, and start_level=0 or in_index to match. '
)
WARNING = 'They are not trained, and distributed training would stop here.'


def warnings_of(folder, prepare=lambda model: model, model=None, times=1):
    """What the hook warns of in a run, after ``prepare`` did something to the model."""
    runner = make_runner(folder, [dict(type='UnusedParametersHook')], model=model or dict(type='SkippingModel'))
    inner = runner.model
    runner.model = prepare(inner) or inner
    lines = []
    runner.logger.warning = lines.append
    for _ in range(times):
        runner.train()
        runner._train_loop = dict(by_epoch=True, max_epochs=2)
    assert not any(parameter._backward_hooks for parameter in inner.parameters())
    return [line for line in lines if 'gradient' in line]


def test_names_parameters_and_outputs_once_a_training(tmp_path):
    assert warnings_of(tmp_path, times=2) == [f'{NAMES}{READ}{WARNING}'] * 2


def freeze(model):
    model.backbone.out_norms['0'].requires_grad_(False)


def test_says_nothing_where_all_are_trained(tmp_path):
    assert warnings_of(tmp_path / 'all', model=dict(type='SkippingModel', skips=False)) == []
    assert warnings_of(tmp_path / 'toy', model=dict(type='ToyModel')) == []
    assert warnings_of(tmp_path / 'frozen', freeze) == []


def test_parameters_that_are_no_output(tmp_path):
    def extend(model):
        freeze(model)
        model.unread = nn.Linear(1, 1)

    assert warnings_of(tmp_path, extend) == [
        f'2 parameters got no gradient in the first iteration: unread.weight, unread.bias. {WARNING}'
    ]


def test_outputs_that_are_read():
    model = SkippingModel()
    assert read_outputs(model, ['backbone.out_norms.3.bias', 'head.weight']) == (0, 1)
    assert read_outputs(model, ['head.weight']) is None
    assert read_outputs(model, ['a_backbone.out_norms.0.bias', 'backbone.out_normss.0.bias']) is None  # of others
    assert read_outputs(model, [f'backbone.out_norms.{i}.bias' for i in (0, 1, 3)]) is None
    detector = nn.Module()
    detector.a_backbone, detector.detector = nn.Module(), model
    detector.a_backbone.out_indices = (0, 2)  # of another, that comes first
    assert read_outputs(detector, ['detector.backbone.out_norms.0.bias']) == (1, 3)


class Searching(Wrapped):
    """One that looks for them in each iteration."""

    find_unused_parameters = True

    def train_step(self, *args, **kwargs):
        return self.module.train_step(*args, **kwargs)


class Sharded(MMFullyShardedDataParallel):
    """A wrapper that flattens parameters."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module

    train_step = Searching.train_step


def test_models_in_wrappers(tmp_path):
    both = warnings_of(tmp_path / 'two', lambda model: Searching(Searching(model)))
    assert both == [f'{NAMES}{READ}{WARNING}']
    assert warnings_of(tmp_path / 'sharded', Sharded) == []


def test_distributed_training_stops_or_is_told_to_search(tmp_path):
    """In one process: what several of them do is a slow test of test_distributed.py."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        with pytest.raises(RunError) as found:
            warnings_of(tmp_path / 'stops', CPUDistributedDataParallel)
        assert str(found.value) == (
            f'{NAMES}{READ}Distributed training stops at such parameters; find_unused_parameters=True lets them be, '
            'at the price of a search in each iteration.'
        )
        good = dict(type='SkippingModel', skips=False)
        assert warnings_of(tmp_path / 'good', CPUDistributedDataParallel, good) == []
    finally:
        leave_process_group(failed=False)
