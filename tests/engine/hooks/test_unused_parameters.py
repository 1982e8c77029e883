# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The hook that names parameters without gradient."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine_toys import Wrapped, make_runner
from mmengine.model import BaseModel, MMFullyShardedDataParallel
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError, UnusedParametersHook
from mmlinattn.engine.hooks.unused_parameters import read_outputs
from mmlinattn.engine.runner.distributed import leave_process_group

TESTS = Path(__file__).resolve().parents[2]


@MODELS.register_module(force=True)
class SkippingModel(BaseModel):
    """Like a detector whose neck skips the first map of its backbone."""

    def __init__(self, skips=True):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.out_indices = (0, 1, 3)
        self.backbone.stem = nn.Linear(4, 4)
        self.backbone.out_norms = nn.ModuleDict({str(i): nn.LayerNorm(4) for i in (0, 1, 3)})
        self.skips = skips

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = self.backbone.stem(torch.stack(list(inputs)))
        norms = list(self.backbone.out_norms.values())[self.skips :]
        return dict(loss=sum(norm(x).square().sum() for norm in norms) + 0 * x.sum())


def warnings_of(tmp_path, model):
    runner = make_runner(tmp_path, [dict(type='UnusedParametersHook')], model=model, name='skips')
    with mock.patch.object(runner.logger, 'warning') as warning:
        runner.train()
    return [call.args[0] for call in warning.call_args_list if 'gradient' in call.args[0]]


def test_names_parameters_and_outputs_once(tmp_path):
    (message,) = warnings_of(tmp_path, dict(type='SkippingModel'))
    assert message.startswith('2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, ')
    assert 'model.backbone.out_indices=(1, 3)' in message


def test_says_nothing_where_all_are_trained(tmp_path):
    assert warnings_of(tmp_path, dict(type='SkippingModel', skips=False)) == []
    assert warnings_of(tmp_path / 'toy', dict(type='ToyModel')) == []


def test_frozen_parameters_are_meant(tmp_path):
    runner = make_runner(tmp_path, [dict(type='UnusedParametersHook')], model=dict(type='SkippingModel'), name='frozen')
    for parameter in runner.model.backbone.out_norms['0'].parameters():
        parameter.requires_grad = False
    with mock.patch.object(runner.logger, 'warning') as warning:
        runner.train()
    assert not any('gradient' in call.args[0] for call in warning.call_args_list)


def test_outputs_that_are_read():
    model = SkippingModel()
    assert read_outputs(model, ['backbone.out_norms.3.bias', 'head.weight']) == (0, 1)
    assert read_outputs(model, ['head.weight']) is None
    assert read_outputs(model, ['a_backbone.out_norms.0.bias', 'backbone.out_normss.0.bias']) is None  # of others
    detector = nn.Module()
    detector.detector = model
    assert read_outputs(detector, ['detector.backbone.out_norms.0.bias']) == (1, 3)
    pair = nn.Module()
    pair.a_backbone, pair.backbone = nn.Module(), model.backbone
    pair.a_backbone.out_indices = (0, 2)  # of another, that comes first
    assert read_outputs(pair, ['backbone.out_norms.0.bias']) == (1, 3)
    assert read_outputs(model, [f'backbone.out_norms.{i}.bias' for i in (0, 1, 3)]) is None


READ = (
    'What follows the backbone does not read all of its maps: set model.backbone.out_indices=(1, 3), the in_channels '
    'of the neck or heads to these maps, and start_level=0 or in_index to match. '
)
NAMES = '2 parameters got no gradient in the first iteration: backbone.out_norms.0.weight, backbone.out_norms.0.bias. '


def one_iteration(hook, model, times=1, inner=None):
    """What the hook warns of; ``inner`` is what is run in place of a wrapper."""
    lines = []
    runner = SimpleNamespace(model=model, logger=SimpleNamespace(warning=lines.append))
    hook.before_train(runner)
    for _ in range(times):
        (inner or model)([torch.ones(4)], mode='loss')['loss'].backward()
        hook.after_train_iter(runner, 0)
    return lines


def test_the_line_of_one_process():
    hook, model = UnusedParametersHook(), SkippingModel()
    expected = f'{NAMES}{READ}They are not trained, and distributed training would stop here.'
    assert one_iteration(hook, model, times=2) == [expected]
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    hook.before_train(SimpleNamespace(model=model))  # of a run that ended before its first iteration
    assert one_iteration(hook, model) == [expected]  # a second training with the same hook
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    model.skips, model.unread = False, nn.Linear(1, 1)
    (line,) = one_iteration(hook, model)
    assert line == (
        '2 parameters got no gradient in the first iteration: unread.weight, unread.bias. They are not trained, and '
        'distributed training would stop here.'
    )


@pytest.mark.parametrize('num_wrappers', [1, 2])
def test_names_are_those_of_the_model_in_its_wrappers(num_wrappers):
    model = wrapped = SkippingModel()
    for _ in range(num_wrappers):
        wrapped = Wrapped(wrapped)
    wrapped.find_unused_parameters = True
    assert one_iteration(UnusedParametersHook(), wrapped, inner=model) == [
        f'{NAMES}{READ}They are not trained, and distributed training would stop here.'
    ]


def test_wrappers_that_flatten_parameters_are_left_alone():
    class Sharded(MMFullyShardedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = module

    hook, model = UnusedParametersHook(), SkippingModel()
    runner = SimpleNamespace(model=Sharded(model))
    hook.before_train(runner)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    hook.after_train_iter(runner, 0)  # without a word


def test_distributed_training_stops_or_is_told_to_search(tmp_path):
    """In one process: what several of them do is a slow test."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        with pytest.raises(RunError) as found:
            one_iteration(UnusedParametersHook(), CPUDistributedDataParallel(SkippingModel()))
        assert str(found.value) == (
            f'{NAMES}{READ}Distributed training stops at such parameters; find_unused_parameters=True lets them be, '
            'at the price of a search in each iteration.'
        )
        assert one_iteration(UnusedParametersHook(), CPUDistributedDataParallel(SkippingModel(skips=False))) == []
        model = CPUDistributedDataParallel(SkippingModel(), find_unused_parameters=True)
        assert one_iteration(UnusedParametersHook(), model) == [
            f'{NAMES}{READ}They are not trained, and distributed training would stop here.'
        ]
    finally:
        leave_process_group(failed=False)


SCRIPT = """
import sys
from pathlib import Path

import torch.distributed
from engine_toys import make_runner
from mmengine.config import Config
from test_unused_parameters import SkippingModel

from mmlinattn.engine import prepare_distributed

if __name__ == '__main__':
    cfg = Config(dict(launcher='pytorch', find_unused_parameters=sys.argv[2] == 'True'))
    prepare_distributed(cfg)
    runner = make_runner(
        Path(sys.argv[1]),
        [dict(type='UnusedParametersHook')],
        launcher=cfg.launcher,
        cfg=dict(model_wrapper_cfg=cfg.model_wrapper_cfg.to_dict()),
        model=dict(type='SkippingModel'),
        loader=dict(batch_size=2),
    )
    try:
        runner.train()
        message = 'trained'
    except RuntimeError as error:
        message = f'{type(error).__name__}: {error}'
    Path(sys.argv[1], f'rank{torch.distributed.get_rank()}.txt').write_text(message)
"""


@pytest.mark.slow
@pytest.mark.parametrize('find_unused', [False, True])
def test_distributed_training_stops_before_the_puzzle(tmp_path, find_unused):
    (tmp_path / 'script.py').write_text(SCRIPT)
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    env = {
        **os.environ,
        'PYTHONPATH': f'{TESTS}/lean:{TESTS}:{TESTS}/engine/hooks:{TESTS.parent}',
        'OMP_NUM_THREADS': '1',
    }
    work = tmp_path / 'work'
    done = subprocess.run(
        [*command, str(tmp_path / 'script.py'), str(work), str(find_unused)],
        capture_output=True,
        text=True,
        env=env,
    )
    messages = [(work / f'rank{rank}.txt').read_text() for rank in range(2)]
    for message in messages:
        if find_unused:
            assert message == 'trained', done.stderr[-2000:]
        else:
            assert message.startswith('RunError: 2 parameters got no gradient')
            assert 'out_indices=(1, 3)' in message
