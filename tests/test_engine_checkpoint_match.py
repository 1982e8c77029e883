# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A checkpoint whose head is of other classes than the model's."""

import pytest
import torch
from engine_toys import Count, ToyModel, make_runner
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.engine import RunError


@MODELS.register_module(force=True)
class ToyClassifier(ToyModel):
    """ToyModel with a head, and one that only trains."""

    def __init__(self, num_classes=3, **kwargs):
        super().__init__(**kwargs)
        self.decode_head = nn.ModuleDict(dict(conv_seg=nn.Linear(4, num_classes)))
        self.auxiliary_head = nn.Linear(4, num_classes)
        self.register_buffer('count', torch.zeros(()))


class Resizing(ToyModel):
    """Resizes a table on loading, as backbones do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2))
        self._register_load_state_dict_pre_hook(self.resize)

    def resize(self, state, prefix, *_):
        state[f'{prefix}table'] = state[f'{prefix}table'][:2]


@pytest.fixture
def checkpoint(tmp_path):
    state = {f'module.{key}': value for key, value in ToyClassifier(num_classes=5).state_dict().items()}
    torch.save(dict(state_dict=state, meta={}), tmp_path / 'five.pth')
    return str(tmp_path / 'five.pth')


def runner_of(tmp_path, checkpoint, model=None, left_out=(), **kwargs):
    hooks = [dict(type='FiniteLossHook'), dict(type='CheckpointMatchHook', left_out=left_out)]
    model = model or dict(type='ToyClassifier')
    kwargs.update(load_from=checkpoint, cfg=dict(custom_hooks=hooks))
    runner = make_runner(tmp_path / 'work', hooks, model=model, **kwargs)
    lines = []
    runner.logger.warning = lines.append
    return runner, lines


def evaluating(tmp_path, checkpoint, **kwargs):
    loader = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler'), batch_size=4)
    runner, _ = runner_of(tmp_path, checkpoint, test_dataloader=loader, test_cfg={}, test_evaluator=[Count()], **kwargs)
    return runner


def of_hook(lines):
    return [line for line in lines if 'does not fit' in line]


def test_training_goes_on_and_says_what_was_left_out(tmp_path, checkpoint):
    runner, lines = runner_of(tmp_path, checkpoint)
    runner.train()
    (line,) = of_hook(lines)
    assert 'decode_head.conv_seg.weight (5x4 in the file, 3x4 in the model)' in line
    assert 'auxiliary_head.bias (5 in the file, 3 in the model)' in line
    assert line.endswith('--cfg-options custom_hooks.1.left_out=decode_head.conv_seg,auxiliary_head')
    expected = torch.load(checkpoint)['state_dict']['module.layer.weight']
    assert runner.iter == 6 and runner.model.layer.weight.shape == expected.shape


def test_what_is_meant_is_not_warned_of(tmp_path, checkpoint):
    runner, lines = runner_of(tmp_path, checkpoint, left_out=['decode_head.conv_seg', 'auxiliary_head'])
    runner.train()
    assert of_hook(lines) == []


def test_testing_another_head_stops(tmp_path, checkpoint):
    with pytest.raises(RunError) as error:
        evaluating(tmp_path, checkpoint).test()
    message = str(error.value)
    assert 'decode_head.conv_seg.weight (5x4 in the file, 3x4 in the model)' in message
    assert 'auxiliary_head' not in message  # not used in tests
    assert message.endswith('--cfg-options custom_hooks.1.left_out=decode_head.conv_seg')
    assert evaluating(tmp_path, checkpoint, left_out='decode_head').test()


def test_testing_without_a_head_stops(tmp_path, checkpoint):
    state = ToyClassifier().state_dict()
    del state['auxiliary_head.weight'], state['count']
    torch.save(dict(state_dict=state), checkpoint)
    assert evaluating(tmp_path, checkpoint).test()
    del state['decode_head.conv_seg.weight']
    torch.save(state, checkpoint)  # bare
    with pytest.raises(RunError, match=r'1 parameters not in the file: decode_head\.conv_seg\.weight'):
        evaluating(tmp_path, checkpoint).test()


def test_resuming_with_another_head_stops(tmp_path, checkpoint):
    runner, _ = runner_of(tmp_path, checkpoint, resume=True)
    with pytest.raises(RunError, match='decode_head.conv_seg.weight'):
        runner.train()


def test_what_the_model_resizes_fits(tmp_path, checkpoint):
    MODELS.register_module(module=Resizing, force=True)
    torch.save(dict(Resizing().state_dict(), table=torch.ones(7), of_another=torch.ones(1)), checkpoint)
    assert evaluating(tmp_path, checkpoint, model=dict(type='Resizing')).test()
