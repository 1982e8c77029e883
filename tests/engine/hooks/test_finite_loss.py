# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
import torch
from engine_toys import make_runner
from mmengine.registry import HOOKS as HOOK_REGISTRY
from mmengine.registry import MODEL_WRAPPERS
from mmengine.structures import BaseDataElement

from mmlinattn.engine import CPUDistributedDataParallel, FiniteLossHook, RunError, finite
from mmlinattn.engine.hooks.finite_loss import batch_file_names

HOOKS = [dict(type='FiniteLossHook'), dict(type='CheckpointGuardHook')]


BAD = pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')], ids=str)


@BAD
def test_stops_at_a_loss_that_is_not_finite(tmp_path, bad):
    """Step 5 is the second batch of epoch 2 (3 batches an epoch)."""
    runner = make_runner(
        tmp_path,
        HOOKS,
        model=dict(bad_at=4, bad=bad),
        loader=dict(sampler=dict(type='DefaultSampler', shuffle=False)),
    )
    with pytest.raises(RunError, match=r'iteration 5 \(epoch 2\).*loss=(nan|-?inf)') as caught:
        runner.train()
    assert all(f'folder/{index}.jpg' in str(caught.value) for index in (4, 5, 6, 7))
    assert 'folder/3.jpg' not in str(caught.value)
    assert (tmp_path / 'epoch_1.pth').exists()
    assert not (tmp_path / 'epoch_2.pth').exists()


def test_no_checkpoint_after_the_last_loss_of_an_epoch_broke(tmp_path):
    runner = make_runner(tmp_path, HOOKS, model=dict(bad_at=5))
    with pytest.raises(RunError, match='iteration 6'):
        runner.train()
    assert (tmp_path / 'last_checkpoint').read_text().endswith('epoch_1.pth')
    assert not (tmp_path / 'epoch_2.pth').exists()


@BAD
def test_weights_broken_under_a_finite_loss_are_not_saved(tmp_path, bad):
    runner = make_runner(tmp_path, HOOKS, model=dict(bad_at=5, break_weights=True, bad=bad))
    with pytest.raises(RunError, match='layer.weight: this checkpoint is not written'):
        runner.train()
    assert not torch.isfinite(runner.model.layer.weight).all()
    assert not (tmp_path / 'epoch_2.pth').exists()
    assert (tmp_path / 'last_checkpoint').read_text().endswith('epoch_1.pth')


def test_good_runs_are_left_alone(tmp_path):
    runner = make_runner(tmp_path, HOOKS)
    runner.train()
    assert (tmp_path / 'epoch_2.pth').exists()


@pytest.mark.parametrize(
    'batch',
    [
        dict(inputs=[], data_samples=[BaseDataElement(metainfo=dict(img_path=f'{name}.jpg')) for name in 'bacb']),
        [dict(inputs=0, data_samples=BaseDataElement(metainfo=dict(img_path=f'{name}.jpg'))) for name in 'bacb'],
    ],
    ids=['collated', 'list of samples'],
)
def test_file_names_of_a_batch(batch):
    """In the order of the batch, and as often as they are in it."""
    assert batch_file_names(batch) == ['b.jpg', 'a.jpg', 'c.jpg', 'b.jpg']


def test_file_names_of_a_batch_without_any():
    assert batch_file_names(dict(inputs=torch.zeros(2))) == []
    assert batch_file_names([torch.zeros(2)]) == []


RUNNER = SimpleNamespace(iter=9, epoch=1)
ADVICE = (
    'No checkpoint was written after it. Resume from the last checkpoint with a lower learning rate or gradient '
    'clipping, or look at these images.'
)


def test_the_line_about_a_loss(monkeypatch):
    batch = [dict(data_samples=BaseDataElement(metainfo=dict(img_path=name))) for name in ('a.jpg', 'b.jpg')]
    outputs = dict(loss=torch.tensor(float('nan')), loss_cls=torch.tensor(0.25), note='text')

    def line(batch):
        with pytest.raises(RunError) as found:
            FiniteLossHook().after_train_iter(RUNNER, 0, batch, outputs)
        return str(found.value)

    begin, terms = 'the loss is not finite at iteration 10 (epoch 2): process', 'loss=nan, loss_cls=0.25 on images'
    assert line(batch) == f'{begin} 0: {terms} a.jpg, b.jpg. {ADVICE}'
    assert line(None) == f'{begin} 0: {terms} (the data samples carry no img_path). {ADVICE}'
    # of several processes those are named whose loss it was; the others stop with them
    monkeypatch.setattr(finite, 'get_world_size', lambda: 2)
    monkeypatch.setattr(finite, 'get_rank', lambda: 1)
    reduced = []
    monkeypatch.setattr(finite, 'all_reduce', lambda tensor, op: reduced.append(op) or tensor.fill_(1))
    monkeypatch.setattr(finite, 'all_gather_object', lambda mine: [None, mine, (3, dict(loss=float('inf')), ['c.jpg'])])
    assert line(batch[:1]) == f'{begin} 1: {terms} a.jpg; process 3: loss=inf on images c.jpg. {ADVICE}'
    outputs['loss'] = torch.tensor(1.0)
    assert line(batch) == f'{begin} 3: loss=inf on images c.jpg. {ADVICE}'
    assert reduced == ['max'] * 2
    monkeypatch.setattr(finite, 'all_reduce', lambda tensor, op: tensor)
    for good in (outputs, None, {}, dict(loss=float('nan'))):
        FiniteLossHook().after_train_iter(RUNNER, 0, batch, good)


def test_the_line_about_weights():
    bad = torch.tensor([1.0, float('inf')])
    state = {**{f'w{i}': bad for i in range(4)}, 'good': torch.ones(1), 'count': torch.tensor(3), 'name': 'text'}
    with pytest.raises(RunError) as found:
        FiniteLossHook().before_save_checkpoint(RUNNER, dict(state_dict=state))
    assert str(found.value) == (
        '4 tensors of the model are not finite at iteration 10, among them w0, w1, w2: this checkpoint is not written '
        'and the previous one stays the last.'
    )
    FiniteLossHook().before_save_checkpoint(RUNNER, {})


def test_one_sample_alone_and_samples_of_other_kinds():
    sample = BaseDataElement(metainfo=dict(img_path='a.jpg'))
    assert batch_file_names(dict(data_samples=sample)) == ['a.jpg']
    assert batch_file_names(dict(data_samples=(sample, None, sample))) == ['a.jpg', 'a.jpg']


def test_hooks_have_their_names_and_their_turn(tmp_path):
    """Checks come before anything is logged or written; what stops a run comes last, after rates and checkpoints."""
    first = (
        'CheckpointGuardHook CheckpointMatchHook DataCheckHook ExactResumeHook FiniteLossHook UnusedParametersHook'
    ).split()
    runner = make_runner(tmp_path, [dict(type=name) for name in ('StopHook', *first)])
    order = [type(hook).__name__ for hook in runner.hooks]
    assert set(order[: len(first) + 1]) == {*first, 'RuntimeInfoHook'}
    assert order[-2:] == ['CheckpointHook', 'StopHook']
    assert HOOK_REGISTRY.get('SafeCheckpointHook').priority == 'VERY_LOW'
    assert MODEL_WRAPPERS.get('CPUDistributedDataParallel') is CPUDistributedDataParallel
