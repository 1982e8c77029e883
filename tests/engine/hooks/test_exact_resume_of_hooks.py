# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""State of hooks in a resumed run, and transitions made twice."""

from functools import partial

import pytest
import torch
from helpers import engine_toys
from helpers.engine_toys import At, Count, interrupt, validation
from mmengine.hooks import EarlyStoppingHook, Hook

from mmlinattn.engine import SafeRunner

make_runner = partial(engine_toys.make_runner, kind=SafeRunner, randomness=dict(seed=1))
HOOKS = [dict(type='ExactResumeHook'), dict(type='StopHook')]


class Constant(Count):
    def compute_metrics(self, results):
        Count.calls += 1
        return dict(acc=1.0)


def run(folder, *hooks, breaks=None, epochs=4, **more):
    Count.calls = 0
    if (folder / 'last_checkpoint').exists():
        more.update(load_from=(folder / 'last_checkpoint').read_text(), resume=True)
    made = make_runner(
        folder,
        [*HOOKS, *hooks],
        dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        **{**validation(Constant()), **more},
    )
    if breaks is None:
        made.train()
        return made
    made.register_hook(At(breaks[0], interrupt, breaks[1]), 'VERY_HIGH')
    with pytest.raises(KeyboardInterrupt):
        made.train()
    return made


@pytest.mark.parametrize(
    ('breaks', 'validations'),
    [
        ((6, 'val'), 3),  # of epochs 2, 3 and 4
        ((7, 'train'), 3),  # the checkpoint of epoch 2 is older than its validation
    ],
)
def test_a_validation_that_the_checkpoint_owes_is_made_first(tmp_path, breaks, validations):
    run(tmp_path, breaks=breaks)
    made = run(tmp_path)
    assert Count.calls == validations and made.iter == 12
    run(tmp_path, epochs=4)
    assert Count.calls == 1  # of the last epoch, as its checkpoint is older, too


def test_early_stopping_counts_on(tmp_path):
    """The first validation is the best, and three more end the training."""

    def hook():
        return EarlyStoppingHook('acc', rule='greater', min_delta=0.1, patience=3)

    run(tmp_path / 'cut', hook(), breaks=(10, 'train'), epochs=9)
    cut, whole = run(tmp_path / 'cut', hook(), epochs=9), run(tmp_path / 'whole', hook(), epochs=9)
    assert cut.epoch == whole.epoch == 4


def test_a_run_that_stops_early_is_saved(tmp_path):
    hook = EarlyStoppingHook('acc', rule='greater', min_delta=0.1, patience=1)
    made = run(tmp_path, hook, default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=5)))
    assert made.epoch == 2 and [path.name for path in tmp_path.glob('*.pth')] == ['epoch_2.pth']


@pytest.mark.parametrize('by_epoch', [True, False])
@pytest.mark.parametrize('stops', [(4, 5), (4, 6), (3, 5)])
def test_a_run_that_is_stopped_twice(tmp_path, monkeypatch, stops, by_epoch):
    """Twice within an epoch, in two epochs, and at the beginning of one."""

    def weights(made):
        return torch.cat([value.flatten() for value in made.model.state_dict().values()])

    def stop(runner):
        next(hook for hook in runner.hooks if type(hook).__name__ == 'StopHook').is_signalled = True

    loop = dict(by_epoch=True, max_epochs=3) if by_epoch else dict(by_epoch=False, max_iters=9)
    whole = make_runner(tmp_path / 'whole', HOOKS, loop)
    whole.train()
    start = {}
    for at in stops:
        made = make_runner(tmp_path / 'work', [*HOOKS, At(at, stop)], loop, **start)
        with pytest.raises(SystemExit):
            made.train()
        start = dict(load_from=(tmp_path / 'work/last_checkpoint').read_text(), resume=True)
    made = make_runner(tmp_path / 'work', HOOKS, loop, **start)
    made.train()
    assert made.iter == 9 and torch.equal(weights(made), weights(whole))


@pytest.mark.parametrize(
    'schedule',
    [
        dict(type='MultiStepLR', milestones=[2], gamma=0.1),
        dict(type='CosineAnnealingLR', T_max=4, end=4, eta_min=0, convert_to_iter_based=True),
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=3),
    ],
)
def test_a_run_resumed_with_another_batch(tmp_path, schedule):
    """The last epoch is trained, at the rate of that part of the schedule."""
    run(tmp_path, epochs=4, breaks=(9, 'train'), param_scheduler=[schedule])
    rates = []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            rates.append((runner.iter, runner.optim_wrapper.get_lr()['lr'][0]))

    made = run(tmp_path, Look(), param_scheduler=[schedule], loader=dict(batch_size=6))
    assert [at for at, _ in rates] == [6, 7] and (made.epoch, made.iter) == (4, 8)
    kind = schedule['type']
    expected = dict(MultiStepLR=(0.001, 0.001), LinearLR=(0.01, 0.01)).get(kind)
    if expected is None:
        expected = [0.01 * (1 + torch.cos(torch.tensor(torch.pi * i / 8)).item()) / 2 for i in (6, 7)]
    assert [rate for _, rate in rates] == pytest.approx(list(expected), rel=0.02)
