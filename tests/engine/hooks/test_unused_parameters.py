# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The hook that names parameters without gradient."""

from functools import partial

import pytest
from helpers.engine_toys import make_runner
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError

NAMES = '2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, backbone.out_norms.0.bias. '
READ = 'Nothing reads the maps [0] of the backbone: leave them out of model.backbone.out_indices, '
WARNING = 'They are not trained, and distributed training would stop here.'


def extend(model):
    """Freeze the unread norm, and add a layer that nothing reads."""
    model.unread = nn.Linear(1, 1)
    model.backbone.out_norms['0'].requires_grad_(False)
    return model


def warnings_of(folder, prepare=lambda model: model, times=1, **model):
    """Run with the model that ``prepare`` returns; return the warnings of the hook."""
    runner = make_runner(folder, [dict(type='UnusedParametersHook')], model={'type': 'SkippingModel', **model})
    inner, lines = runner.model, []
    runner.model, runner.logger.warning = prepare(inner), lines.append
    for _ in range(times):
        runner.train()
        runner._train_loop = dict(by_epoch=True, max_epochs=2)
    assert not any(parameter._backward_hooks for parameter in inner.parameters())
    return [line for line in lines if 'gradient' in line]


def is_named(line):
    return line.startswith(NAMES + READ) and line.endswith(WARNING)


def test_parameters_and_maps_are_named_once(tmp_path):
    lines = warnings_of(tmp_path, times=2)
    assert len(lines) == 2 and all(map(is_named, lines))
    (line,) = warnings_of(tmp_path, extend)
    assert 'first iteration: unread.weight, unread.bias. ' in line and READ not in line


def test_distributed_training_stops_or_searches(tmp_path, one_process):
    with pytest.raises(RunError, match='find_unused_parameters=True accepts them') as found:
        warnings_of(tmp_path, CPUDistributedDataParallel)
    assert str(found.value).startswith(NAMES + READ)
    assert warnings_of(tmp_path, CPUDistributedDataParallel, skips=False) == []
    for accepted in ('find_unused_parameters', 'static_graph'):
        (line,) = warnings_of(tmp_path, partial(CPUDistributedDataParallel, **{accepted: True}))
        assert is_named(line)
