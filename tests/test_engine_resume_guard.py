# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What a run takes over from a checkpoint's runtime information and from ``last_checkpoint``; hostile ones are in
tests/security."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from mmengine.hooks import CheckpointHook

from mmlinattn.checkpoints import CheckpointError
from mmlinattn.engine import RunError, resume_guard
from mmlinattn.engine.resume_guard import find_latest_checkpoint, keep_own_files


def run_in(work_dir, *out_dirs):
    lines = []
    hooks = [object(), *(CheckpointHook(out_dir=folder) for folder in out_dirs)]
    runner = SimpleNamespace(work_dir=str(work_dir), hooks=hooks, logger=SimpleNamespace(warning=lines.append))
    return runner, lines


def test_names_of_other_files_are_dropped_with_one_line(tmp_path):
    runner, lines = run_in(tmp_path / 'work')
    own = {
        'best_ckpt': f'{tmp_path}/work/best_acc_epoch_1.pth',
        'best_ckpt_loss': f'{tmp_path}/elsewhere/../work/best_loss_epoch_1.pth',
        'best_ckpt_none': None,
        'keep_ckpt_ids': [0, 3],
        'best_score': 0.5,
        7: 'best_ckpt',
    }
    info = dict(own)
    keep_own_files(runner, info)
    assert info == own and lines == []
    others = {
        'best_ckpt': f'{tmp_path}/best_acc_epoch_1.pth',
        'best_ckpt_acc': f'{tmp_path}/work/epoch_1.pth',
        'best_ckpt_long': 300 * 'x',
        'keep_ckpt_ids': (1, True),
    }
    info = dict(own, **others)
    keep_own_files(runner, info)
    assert info == {key: value for key, value in own.items() if key not in others}
    assert lines == [
        f'the checkpoint names files that are not checkpoints of this run in {tmp_path}/work: '
        f"best_ckpt = '{tmp_path}/best_acc_epoch_1.pth', keep_ckpt_ids = '(1, True)', "
        f"best_ckpt_acc = '{tmp_path}/work/epoch_1.pth', best_ckpt_long = '{200 * 'x'}'. They are left alone."
    ]


@pytest.mark.parametrize(
    'path, is_own',
    [
        ('s3://bucket/out/best_a.pth', False),
        ('s3://bucket/out/work/best_a.pth', True),
        ('s3://bucket/best_a.pth', False),
        ('s3://bucket/out/work/more/best_a.pth', False),
        ('{tmp}/out/best_a.pth', False),  # the folder of all runs
        ('{tmp}/out/work/best_a.pth', True),
        ('{tmp}/work/best_a.pth', True),
        ('{tmp}/out/other/best_a.pth', False),
        ('{tmp}/work/a_best_.pth', False),
    ],
)
def test_folders_of_a_run(tmp_path, path, is_own):
    runner, lines = run_in(f'{tmp_path}/work/', f'{tmp_path}/out', 's3://bucket/out/')
    info = dict(best_ckpt=path.format(tmp=tmp_path))
    keep_own_files(runner, info)
    assert bool(info) is is_own and len(lines) == (not is_own)
    for hook in runner.hooks[1:2]:  # from then on it has the folder of this run
        runner.logger, runner.message_hub = Mock(), SimpleNamespace(runtime_info={})
        hook.before_train(runner)
    info = dict(best_ckpt=path.format(tmp=tmp_path))
    keep_own_files(runner, info)
    assert bool(info) is is_own


def test_links_are_followed_in_the_folder_and_not_in_the_name(tmp_path):
    """MMEngine removes the name: of a link the link, of a file under a link to its folder the file."""
    (tmp_path / 'work').mkdir()
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'best_of_others.pth').touch()
    (tmp_path / 'work' / 'best_own.pth').touch()
    (tmp_path / 'work' / 'best_link.pth').symlink_to(tmp_path / 'other' / 'best_of_others.pth')
    (tmp_path / 'other' / 'best_link.pth').symlink_to(tmp_path / 'work' / 'best_own.pth')
    (tmp_path / 'by_another_name').symlink_to(tmp_path / 'work')
    (tmp_path / 'work' / 'within').symlink_to(tmp_path / 'other')
    runner, _ = run_in(tmp_path / 'by_another_name')
    for path, is_own in (
        ('work/best_own.pth', True),
        ('work/best_link.pth', True),
        ('by_another_name/best_own.pth', True),
        ('by_another_name/best_link.pth', True),
        ('other/best_link.pth', False),
        ('work/within/best_of_others.pth', False),
        ('by_another_name/within/../best_own.pth', False),  # which is other's parent
    ):
        info = dict(best_ckpt=f'{tmp_path}/{path}')
        keep_own_files(runner, info)
        assert bool(info) is is_own, path


@pytest.mark.parametrize('key', ['best_ckpt', 'best_ckpt_acc', 'keep_ckpt_ids'])
@pytest.mark.parametrize('value', ['', 0])
def test_what_is_empty_is_no_checkpoint_of_the_run_either(tmp_path, key, value):
    """MMEngine asks whether it is None; an empty list of steps is one."""
    runner, lines = run_in(tmp_path, None)
    info = {key: value}
    keep_own_files(runner, info)
    assert info == {} and f': {key} = {str(value)!r}. They are left alone.' in lines[0]
    info = dict(keep_ckpt_ids=[])
    keep_own_files(runner, info)
    assert info == dict(keep_ckpt_ids=[]) and len(lines) == 1
    assert resume_guard._out_dirs(runner) == [str(tmp_path)]  # a hook without a folder of its own adds none


def test_what_a_loaded_checkpoint_hands_on(tmp_path, monkeypatch):
    """The run that resumes has a config and a name of its own."""
    runner, _ = run_in(tmp_path)
    info = dict(cfg='theirs', experiment_name='theirs', best_ckpt='/etc/best_x', epoch=3)
    hub = dict(runtime_info=info, resumed_keys=dict.fromkeys([*info, 'other'], True))
    checked, hubs = [], [hub]
    monkeypatch.setattr(resume_guard, 'check_resumable', lambda *args: checked.append(args))

    def load(runner, filename, *args, **kwargs):
        return dict(message_hub=hubs[-1], given=(filename, args, kwargs))

    loaded = resume_guard._load_checkpoint(load, runner, 'a.pth', 'cpu', strict=True)
    assert loaded['given'] == ('a.pth', ('cpu',), dict(strict=True))
    assert info == dict(epoch=3) and hub['resumed_keys'] == dict(epoch=True, other=True) and checked == []
    runner.is_resuming = True
    loaded = resume_guard._load_checkpoint(load, runner, 'a.pth')
    assert checked == [(runner, loaded, 'a.pth')]
    for other in (None, [], dict(runtime_info=[]), dict(runtime_info=dict(cfg='x'), resumed_keys=None)):
        hubs.append(other)
        resume_guard._load_checkpoint(load, runner, 'a.pth')


@pytest.mark.parametrize('function, verb', [('_load_checkpoint', 'loaded'), ('_resume', 'resumed from')])
def test_what_mmengine_stumbles_over_is_one_line(monkeypatch, function, verb):
    def call(error):
        def fails(runner, filename):
            raise error

        runner = SimpleNamespace()
        try:
            getattr(resume_guard, function)(fails, runner, 'a.pth')
        finally:
            assert not hasattr(runner, 'is_resuming')

    for error, reason in (
        (KeyError('optimizer'), "KeyError: 'optimizer'"),
        (ValueError('first\nsecond'), 'ValueError: first'),
        (AssertionError(), 'AssertionError: '),
        (ZeroDivisionError('x'), 'ZeroDivisionError: x'),
    ):
        with pytest.raises(CheckpointError) as found:
            call(error)
        assert str(found.value) == f'a.pth cannot be {verb} ({reason})'
    others = KeyboardInterrupt(), torch.cuda.OutOfMemoryError('of the GPU')  # a RuntimeError, no fault of the file
    for error in (RunError('ours'), CheckpointError('ours'), OSError(28, 'full'), MemoryError(), *others):
        with pytest.raises(type(error)) as found:
            call(error)
        assert found.value is error


def test_resuming_checks_the_optimizer_afterwards(monkeypatch):
    calls = []
    monkeypatch.setattr(resume_guard, 'check_optimizers', lambda *args: calls.append(args))
    runner = SimpleNamespace()
    resume_guard._resume(
        lambda runner, *args, **kwargs: calls.append((runner.is_resuming, args, kwargs)), runner, 'a', 1, b=2
    )
    assert calls == [(True, ('a', 1), dict(b=2)), (runner, 'a')] and not hasattr(runner, 'is_resuming')


def test_the_checkpoint_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work, pointer = tmp_path / 'work', tmp_path / 'work' / 'last_checkpoint'
    advice = 'Name a checkpoint to resume from, or delete that file to begin from the start.'
    (tmp_path / 'out' / 'work').mkdir(parents=True)
    (tmp_path / 'other').mkdir()
    work.mkdir()
    for path in ('work/epoch_1.pth', 'out/work/epoch_2.pth', 'other/epoch_3.pth'):
        (tmp_path / path).touch()
    (work / 'of_deepspeed').mkdir()
    assert find_latest_checkpoint('work') is None

    def found(text):
        pointer.write_text(text)
        return find_latest_checkpoint('work')

    assert found('work/epoch_1.pth\n') == 'work/epoch_1.pth'
    (tmp_path / 'link').symlink_to(work)
    assert find_latest_checkpoint('link') == 'work/epoch_1.pth'  # the same folder by another name
    assert found(f'{work}/of_deepspeed') == f'{work}/of_deepspeed'
    assert found('out/work/epoch_2.pth') == 'out/work/epoch_2.pth'
    assert find_latest_checkpoint('work/') == find_latest_checkpoint('out/../work/.') == 'out/work/epoch_2.pth'
    assert found('was/here/epoch_1.pth') == os.path.join('work', 'epoch_1.pth')
    assert found('s3://bucket/work/epoch_9.pth') == 's3://bucket/work/epoch_9.pth'
    assert find_latest_checkpoint('work/') == 's3://bucket/work/epoch_9.pth'
    for text, where in (
        ('other/epoch_3.pth', 'elsewhere'),
        ('work/epoch_7.pth', 'not there'),
        ('s3://bucket/other/epoch_9.pth', 'elsewhere'),
        ('http://host/work/epoch_9.pth', 'elsewhere'),
        ('https://host/work/epoch_9.pth', 'elsewhere'),
        ('work/', 'elsewhere'),
    ):
        with pytest.raises(CheckpointError) as error:
            found(text)
        assert str(error.value) == f'work/last_checkpoint names {text!r}, which is {where}. {advice}'
    for content in (b'', b' \n', b'\xff', b'a\x00b', 5000 * b'x'):
        pointer.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            find_latest_checkpoint('work')
        assert str(error.value) == (f'work/last_checkpoint names no checkpoint: it holds {content[:40]!r}. {advice}')
    pointer.unlink()
    pointer.mkdir()
    with pytest.raises(CheckpointError) as error:
        find_latest_checkpoint('work')
    assert str(error.value) == f'work/last_checkpoint is not a file. {advice}'
    pointer.rmdir()
    pointer.symlink_to('gone')  # something was to be resumed from, so that nothing begins anew
    with pytest.raises(CheckpointError) as error:
        find_latest_checkpoint('work')
    assert str(error.value) == f'work/last_checkpoint is not a file. {advice}'
    pointer.unlink()
    longest = 'work/epoch_1.pth'.ljust(4096, '\n')
    assert found(longest) == 'work/epoch_1.pth'
    with pytest.raises(CheckpointError, match='names no checkpoint: it holds'):
        found(longest + '\n')


def test_every_place_that_looks_for_the_last_checkpoint_is_guarded():
    """Of MMEngine's modules, each of which has the function by a name of its own."""
    from mmengine import runner as package
    from mmengine.runner import _flexible_runner, checkpoint, runner

    for module in (package, _flexible_runner, checkpoint, runner):
        assert module.find_latest_checkpoint is find_latest_checkpoint
    for owner, name in (
        (runner.Runner, 'load_checkpoint'),
        (runner.Runner, 'resume'),
        (CheckpointHook, 'before_train'),
    ):
        guarded = getattr(owner, name)
        assert (
            guarded.is_guarded and guarded.__wrapped__.__module__.startswith('mmengine.') and guarded.__name__ == name
        )
        resume_guard.guard()  # a second time
        assert getattr(owner, name) is guarded and not hasattr(guarded.__wrapped__, 'is_guarded')


def test_what_is_guarded_takes_and_gives_what_it_did():
    class Owner:
        def method(self, *args, **kwargs):
            """Of the owner."""
            return self, args, kwargs

    wrapped = []
    for _ in range(2):
        resume_guard._wrap(
            Owner,
            'method',
            lambda original, owner, *args, **kwargs: wrapped.append(owner) or original(owner, *args, **kwargs),
        )
    owner = Owner()
    assert owner.method('a.pth', 'cpu', strict=True) == (owner, ('a.pth', 'cpu'), dict(strict=True))
    assert wrapped == [owner] and Owner.method.__doc__ == 'Of the owner.'
