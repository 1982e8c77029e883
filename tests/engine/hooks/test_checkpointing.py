# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import errno
import os

import pytest
from helpers.engine_toys import Count, make_runner, validation, warnings_of
from mmengine.hooks import CheckpointHook
from mmengine.runner import find_latest_checkpoint

from mmlinattn.checkpoints import load_file
from mmlinattn.engine import RunError, SafeCheckpointHook, SafeRunner


def runner_of(folder, train_cfg=None, evaluators=(), resume=False, **checkpoint):
    """A Runner with settings of its checkpoint hook, and a validation for ``save_best``."""
    evaluation = validation(*evaluators) if 'save_best' in checkpoint else {}
    default_hooks = dict(checkpoint={'type': 'CheckpointHook', 'interval': 1, **checkpoint})
    options = dict(default_hooks=default_hooks, resume=resume, kind=SafeRunner)
    return make_runner(folder, [], train_cfg, **options, **evaluation)


def files(folder):
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix != '.py')


@pytest.fixture
def full_disk(monkeypatch):
    """Let the disk be full for a file, after some good writes of it."""
    replace = os.replace

    def fill(name, num_good_writes=0):
        left = iter(range(num_good_writes))

        def fail(part, path):
            if str(path).endswith(name) and next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(part, path)

        monkeypatch.setattr('os.replace', fail)

    return fill


class Own(CheckpointHook):
    """A checkpoint hook of the user."""


@pytest.mark.parametrize('kind', ['CheckpointHook', 'mmengine.CheckpointHook', CheckpointHook])
def test_the_runner_builds_the_safe_hook_with_all_settings(tmp_path, kind):
    runner = runner_of(tmp_path, type=kind, max_keep_ckpts=3, save_optimizer=False, priority='LOW')
    runner.register_hook(Own(interval=5))
    runner.train()
    hook, own = (hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
    assert (type(hook), type(own)) == (SafeCheckpointHook, Own)
    assert (hook.max_keep_ckpts, hook.save_optimizer, hook.priority) == (3, False, 'LOW')
    assert files(tmp_path) == ['epoch_1.pth', 'epoch_2.pth', 'last_checkpoint']
    assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_2.pth')
    assert runner.message_hub.get_info('last_ckpt') == str(tmp_path / 'epoch_2.pth')  # hooks of others read it


def test_every_setting_of_the_hook_counts(tmp_path):
    out = tmp_path / 'out' / 'work'
    settings = dict(interval=2, by_epoch=False, save_optimizer=False, save_param_scheduler=False, max_keep_ckpts=2)
    settings.update(filename_tmpl='at_{}.pth', out_dir=str(tmp_path / 'out'))
    runner_of(tmp_path / 'work', dict(by_epoch=False, max_iters=6), **settings).train()
    assert files(out) == ['at_4.pth', 'at_6.pth']
    assert (tmp_path / 'work' / 'last_checkpoint').read_text() == str(out / 'at_6.pth')
    saved = load_file(out / 'at_6.pth')  # by the safe loader
    assert saved['meta']['iter'] == 6 and 'optimizer' not in saved and 'param_schedulers' not in saved
    # for the run that resumes
    assert saved['message_hub']['runtime_info']['keep_ckpt_ids'] == [4, 6]
    assert saved['message_hub']['runtime_info']['last_ckpt'] == str(out / 'at_6.pth')


def test_an_unknown_setting_is_refused_before_the_first_step(tmp_path):
    runner = runner_of(tmp_path, max_keep_ckpt=3)
    with pytest.raises(RunError, match="checkpoint.max_keep_ckpt=3: nothing reads it. Did you mean 'max_keep_ckpts'?"):
        runner.train()
    assert runner.iter == 0


@pytest.mark.parametrize('full_at', ['epoch_2.pth', 'last_checkpoint'])
@pytest.mark.parametrize('is_resumed', [False, True])
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, full_disk, monkeypatch, full_at, is_resumed):
    if is_resumed:
        runner_of(tmp_path, dict(by_epoch=True, max_epochs=1), max_keep_ckpts=1).train()
    full_disk(full_at, num_good_writes=int(full_at == 'last_checkpoint' and not is_resumed))
    with pytest.raises(RunError, match='epoch_2.pth could not be written: No space left.*epoch_1.pth is intact'):
        runner_of(tmp_path, max_keep_ckpts=1, resume=is_resumed).train()
    # The checkpoint itself got through when only `last_checkpoint` did not.
    extra = ['epoch_2.pth'] if full_at == 'last_checkpoint' else []
    assert files(tmp_path) == ['epoch_1.pth', *extra, 'last_checkpoint']
    assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_1.pth')
    monkeypatch.undo()
    resumed = runner_of(tmp_path, max_keep_ckpts=1, resume=True)
    resumed.train()
    assert resumed.epoch == 2 and 'optimizer' in load_file(tmp_path / 'epoch_2.pth')
    assert files(tmp_path) == ['epoch_2.pth', 'last_checkpoint']  # the limit counts that of the run before


@pytest.mark.parametrize('metrics', [['acc'], ['a/acc', 'b/acc']])
def test_a_best_checkpoint_of_a_repeated_name_stays(tmp_path, metrics):
    """A validation repeated after resuming gives the best checkpoint the name of the old one, which must not go."""
    evaluators = [Count(prefix=metric.rpartition('/')[0] or None) for metric in metrics]
    save_best = metrics if len(metrics) > 1 else metrics[0]
    runner = runner_of(tmp_path, evaluators=evaluators, save_best=save_best, max_keep_ckpts=2)
    runner.train()
    runner.val_loop.run()
    names = sorted(f'best_{metric.replace("/", "_")}_epoch_2.pth' for metric in metrics)
    assert [name for name in files(tmp_path) if 'best' in name] == names
    # the last checkpoint is saved once more after the best, and counts once
    assert runner.message_hub.get_info('keep_ckpt_ids') == [1, 2]
    assert {'epoch_1.pth', 'epoch_2.pth'} < {*files(tmp_path)}


def test_full_disk_at_the_first_and_at_the_best_checkpoint(tmp_path, full_disk):
    full_disk('epoch_1.pth')
    with pytest.raises(RunError, match='epoch_1.pth could not be written: No space left on device. Make room'):
        runner_of(tmp_path).train()
    full_disk('best_acc_epoch_2.pth')
    with pytest.raises(RunError, match='the best checkpoint could not be written.*best_acc_epoch_1.pth is intact'):
        runner_of(tmp_path / 'best', save_best='acc').train()
    assert 'best_acc_epoch_1.pth' in files(tmp_path / 'best')


class Undefined(Count):
    def compute_metrics(self, results):
        return dict(acc=float('nan'))


def test_a_best_metric_that_is_nan_is_named(tmp_path):
    runner = runner_of(tmp_path, evaluators=[Undefined()], save_best='acc')
    assert warnings_of(runner, "save_best: the metric 'acc' is NaN; no checkpoint is the best")
