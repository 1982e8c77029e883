# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from engine_toys import make_runner
from mmengine.structures import BaseDataElement

from mmlinattn.engine import RunError
from mmlinattn.engine.finite import batch_file_names

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
        dict(inputs=[], data_samples=[BaseDataElement(metainfo=dict(img_path='a.jpg'))]),
        [dict(inputs=0, data_samples=BaseDataElement(metainfo=dict(img_path='a.jpg')))],
    ],
    ids=['collated', 'list of samples'],
)
def test_file_names_of_a_batch(batch):
    assert batch_file_names(batch) == ['a.jpg']


def test_file_names_of_a_batch_without_any():
    assert batch_file_names(dict(inputs=torch.zeros(2))) == []
    assert batch_file_names([torch.zeros(2)]) == []
