# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
import torch
from helpers.engine_toys import make_runner

from mmlinattn.engine import FiniteLossHook, RunError

HOOKS = [dict(type='FiniteLossHook')]
RUNNER = SimpleNamespace(iter=4, epoch=1)


@pytest.mark.parametrize(
    'model, line',
    [
        (dict(bad=-float('inf')), r'not finite at iteration 3 \(epoch 1\): process 0: loss=-inf on images folder/'),
        (dict(break_weights=True), 'not finite at iteration 4: layer.weight. '),
    ],
)
def test_no_checkpoint_after_the_last_iteration_of_an_epoch_broke(tmp_path, model, line):
    with pytest.raises(RunError, match=line):
        make_runner(tmp_path, HOOKS, model=dict(model, bad_at=2)).train()
    assert not list(tmp_path.glob('*.pth'))


def test_infinite_masks_are_saved(tmp_path):
    runner = make_runner(tmp_path, HOOKS)
    runner.model.register_buffer('mask', torch.full((2,), -float('inf')))
    runner.train()
    assert (tmp_path / 'epoch_2.pth').exists()


def test_images_are_named():
    hook, bad = FiniteLossHook(), dict(loss=torch.tensor(float('nan')), loss_cls=torch.tensor(1.5), other='x')
    with pytest.raises(RunError, match='loss=nan, loss_cls=1.5 on images a.jpg. No checkpoint'):
        hook.after_train_iter(RUNNER, 0, dict(data_samples=[SimpleNamespace(img_path='a.jpg')]), bad)
    for batch in (dict(data_samples=[1]), dict(data_samples=1), [1], None):  # of one's own data set
        with pytest.raises(RunError, match='carry no img_path'):
            hook.after_train_iter(RUNNER, 0, batch, bad)
        hook.after_train_iter(RUNNER, 0, batch, dict(loss=torch.tensor(1.0)))
    hook.after_train_iter(RUNNER, 0, None, None)
