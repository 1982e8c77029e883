# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import re

import pytest
from helpers.engine_toys import Count, make_runner, validation


def printed(capsys):
    """Standard output without MMEngine's warnings."""
    return re.sub(r'^.* - WARNING - .*\n', '', capsys.readouterr().out, flags=re.M)


HOOKS = [dict(type='ProgressHook', interval=0)]


@pytest.mark.parametrize('loop', [dict(by_epoch=True, max_epochs=2), dict(by_epoch=False, max_iters=6, val_interval=3)])
def test_lines_from_the_first_step_and_a_table_after_each_validation(tmp_path, capsys, loop):
    Count.calls = 0
    make_runner(tmp_path, HOOKS, loop, **validation()).train()
    out = printed(capsys)
    text = r'epoch 1/2' if loop['by_epoch'] else 'training'
    assert re.match(rf'{text}  step 1/6  loss [\d.]+  lr 0.01  eta 0:00:\d\d\n', out)
    assert out.count(' step ') == 6 + 2 * 3
    names = ('epoch 1', 'epoch 2') if loop['by_epoch'] else ('iteration 3', 'iteration 6')
    for name, value in zip(names, ('1.0000', '2.0000')):
        assert re.search(rf'validation {name} .*?acc +│ +{value} │ +{value} ', out, re.S)


def test_a_run_with_several_learning_rates(tmp_path, capsys):
    made = make_runner(tmp_path, HOOKS)
    made.optim_wrapper = made.build_optim_wrapper(made.optim_wrapper)
    made.optim_wrapper.get_lr = lambda: {'generator.lr': [0.1], 'critic.lr': [0.1]}
    made.train()
    assert re.match(r'epoch 1/2  step 1/6  loss [\d.]+  eta', printed(capsys))


def test_the_best_of_a_run_outlives_its_resumption(tmp_path, capsys):
    Count.calls = 7
    make_runner(tmp_path, HOOKS, dict(by_epoch=True, max_epochs=2), **validation()).train()
    Count.calls = 0
    checkpoint = str(tmp_path / 'epoch_2.pth')
    loop = dict(by_epoch=True, max_epochs=3)
    make_runner(tmp_path, HOOKS, loop, **validation(), load_from=checkpoint, resume=True).train()
    assert re.search(r' value ┃ +best .*acc +│ +1.0000 │ +8.0000 ', capsys.readouterr().out, re.S)


def test_a_test_builds_no_training(tmp_path, capsys):
    """The training data may be missing."""
    names = {f'test_{key[4:]}': value for key, value in validation().items()}
    missing = dict(dataset=dict(type='Missing'))
    make_runner(tmp_path, [*HOOKS, dict(type='ResultsHook')], loader=missing, **names).test()
    out = capsys.readouterr().out
    assert 'acc' in out and 'best' not in out


def test_other_processes_are_silent(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('mmlinattn.engine.hooks.progress.is_main_process', lambda: False)
    make_runner(tmp_path, HOOKS, **validation()).train()
    assert not printed(capsys)
