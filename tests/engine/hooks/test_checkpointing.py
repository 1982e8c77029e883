# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import errno
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from engine_toys import Count, make_runner
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook
from mmengine.runner import find_latest_checkpoint

from mmlinattn.checkpoints import load_file
from mmlinattn.engine import AtomicLocalBackend, CheckpointGuardHook, RunError, SafeCheckpointHook
from mmlinattn.engine.hooks import checkpointing
from mmlinattn.engine.hooks.checkpointing import ATOMIC_BACKEND, _DeferRemoval, explained_write_errors

GUARD = [dict(type='CheckpointGuardHook')]


def checkpoint_cfg(**kwargs):
    return dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, **kwargs)))


def files(folder):
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix != '.py')


def no_space_after(monkeypatch, num_good_writes, name_part=''):
    """The disk is full after some good writes of files whose names hold ``name_part``."""
    flush_to_disk, count = os.fsync, [0]

    def fsync(descriptor):
        if name_part in os.readlink(f'/proc/self/fd/{descriptor}'):
            count[0] += 1
            if count[0] > num_good_writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush_to_disk(descriptor)

    monkeypatch.setattr('os.fsync', fsync)


def test_guard_keeps_the_settings_of_the_checkpoint_hook(tmp_path):
    runner = make_runner(tmp_path, GUARD, **checkpoint_cfg(max_keep_ckpts=3, save_optimizer=False))
    runner.train()
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    assert [type(hook) for hook in hooks] == [SafeCheckpointHook]
    assert hooks[0].max_keep_ckpts == 3
    assert not hooks[0].save_optimizer
    assert files(tmp_path) == ['epoch_1.pth', 'epoch_2.pth', 'last_checkpoint']
    assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_2.pth')
    assert runner.message_hub.get_info('last_ckpt') == str(tmp_path / 'epoch_2.pth')  # hooks of others read it


def test_keeps_the_newest_checkpoints_also_across_a_resume(tmp_path):
    epochs = dict(by_epoch=True, max_epochs=3)
    make_runner(tmp_path, GUARD, train_cfg=epochs, **checkpoint_cfg(max_keep_ckpts=2)).train()
    assert files(tmp_path) == ['epoch_2.pth', 'epoch_3.pth', 'last_checkpoint']
    epochs = dict(by_epoch=True, max_epochs=5)
    make_runner(tmp_path, GUARD, train_cfg=epochs, resume=True, **checkpoint_cfg(max_keep_ckpts=2)).train()
    assert files(tmp_path) == ['epoch_4.pth', 'epoch_5.pth', 'last_checkpoint']


@pytest.mark.skipif(not os.path.isdir('/proc/self/fd'), reason='tells files apart through /proc')
@pytest.mark.parametrize('full_at', ['epoch_2.pth', 'last_checkpoint'])
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, full_at):
    no_space_after(monkeypatch, int(full_at == 'last_checkpoint'), full_at)
    runner = make_runner(tmp_path, GUARD, **checkpoint_cfg(max_keep_ckpts=1))
    with pytest.raises(RunError, match='No space left on device.*epoch_1.pth is intact'):
        runner.train()
    left = files(tmp_path)
    # The checkpoint itself got through when only `last_checkpoint` did not.
    extra = ['epoch_2.pth'] if full_at == 'last_checkpoint' else []
    assert left == ['epoch_1.pth', *extra, 'last_checkpoint']
    assert find_latest_checkpoint(str(tmp_path)) == str(tmp_path / 'epoch_1.pth')

    monkeypatch.undo()
    resumed = make_runner(tmp_path, GUARD, resume=True, **checkpoint_cfg(max_keep_ckpts=1))
    resumed.train()
    assert resumed.epoch == 2
    assert 'epoch_2.pth' in files(tmp_path)


@pytest.mark.parametrize('pointer', [None, 'elsewhere.pth'])
def test_the_previous_checkpoint_of_a_run_that_resumes_is_the_one_it_resumed_from(tmp_path, monkeypatch, pointer):
    make_runner(tmp_path, GUARD, dict(by_epoch=True, max_epochs=1), **checkpoint_cfg()).train()
    runner = make_runner(tmp_path, GUARD, resume=True, load_from=str(tmp_path / 'epoch_1.pth'), **checkpoint_cfg())
    if pointer:  # of no use, and no reason to stop
        (tmp_path / 'last_checkpoint').write_text(pointer)
    no_space_after(monkeypatch, 0, 'epoch_2.pth')
    with pytest.raises(RunError, match='No space left on device') as found:
        runner.train()
    assert ('The previous checkpoint ' in str(found.value)) == (pointer is None)
    assert (f'{tmp_path}/epoch_1.pth is intact' in str(found.value)) == (pointer is None)


def test_full_disk_leaves_the_previous_best_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(Count, 'calls', 0)
    put = AtomicLocalBackend.put

    def full(self, obj, filepath):
        if os.path.basename(filepath) == 'best_acc_epoch_2.pth':
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, obj, filepath)

    loader = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler'), batch_size=4)
    evaluation = dict(val_dataloader=loader, val_cfg={}, val_evaluator=[Count()])
    with monkeypatch.context() as patch:
        patch.setattr(AtomicLocalBackend, 'put', full)
        with pytest.raises(RunError, match='best_acc_epoch_1.pth is intact'):
            make_runner(tmp_path, GUARD, **checkpoint_cfg(save_best='acc'), **evaluation).train()
    assert 'best_acc_epoch_1.pth' in files(tmp_path)

    resumed = checkpoint_cfg(save_best='acc')
    make_runner(tmp_path, GUARD, resume=True, **resumed, **evaluation).train()
    assert [name for name in files(tmp_path) if 'best' in name] == ['best_acc_epoch_1.pth']
    epochs = dict(by_epoch=True, max_epochs=3)
    make_runner(tmp_path, GUARD, resume=True, train_cfg=epochs, **resumed, **evaluation).train()
    assert [name for name in files(tmp_path) if 'best' in name] == ['best_acc_epoch_3.pth']


def test_a_best_checkpoint_whose_name_comes_again_stays(tmp_path, monkeypatch):
    """As where a validation is made up for: what takes the place of the best is not the old one that goes."""
    monkeypatch.setattr(Count, 'calls', 0)
    loader = dict(dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler'), batch_size=4)
    evaluation = dict(val_dataloader=loader, val_cfg={}, val_evaluator=[Count()])
    runner = make_runner(tmp_path, GUARD, **checkpoint_cfg(save_best='acc'), **evaluation)
    runner.train()
    runner.val_loop.run()
    assert runner.message_hub.get_info('best_score') == Count.calls == 3
    assert [name for name in files(tmp_path) if 'best' in name] == ['best_acc_epoch_2.pth']


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    backend, target = AtomicLocalBackend(), tmp_path / 'new' / 'file.bin'
    backend.put(b'old', target)
    monkeypatch.setattr('os.replace', lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, 'I/O')))
    with pytest.raises(OSError, match='I/O'):
        backend.put(b'new', target)
    assert target.read_bytes() == b'old'
    assert files(target.parent) == ['file.bin']


@pytest.mark.skipif(sys.platform == 'win32', reason='resource limits are POSIX')
def test_a_file_cut_off_by_the_system_never_gets_its_name(tmp_path):
    """A real failed write of the system: the process may not write files above 1 MB."""
    script = textwrap.dedent("""
        import resource, signal, sys
        from mmlinattn.engine import AtomicLocalBackend
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        backend = AtomicLocalBackend()
        backend.put(b'x' * 1000, sys.argv[1])
        try:
            backend.put(b'x' * 2**21, sys.argv[1])
        except OSError as error:
            sys.exit(f'refused: {error.strerror}')
    """)
    target = tmp_path / 'epoch_1.pth'
    done = subprocess.run([sys.executable, '-c', script, str(target)], capture_output=True, text=True)
    assert 'refused: File too large' in done.stderr
    assert target.read_bytes() == b'x' * 1000
    assert files(tmp_path) == ['epoch_1.pth']


def test_checkpoints_stay_loadable_by_the_safe_loader(tmp_path):
    make_runner(tmp_path, GUARD).train()
    checkpoint = load_file(tmp_path / 'epoch_2.pth')
    assert checkpoint['meta']['epoch'] == 2


def test_the_line_about_a_disk():
    again = 'Make room and start again with --resume.'
    with pytest.raises(RunError) as found, explained_write_errors('b.pth', 'a.pth'):
        raise OSError(errno.ENOSPC, 'No space')
    assert str(found.value) == f'b.pth could not be written: No space. The previous checkpoint a.pth is intact. {again}'
    with pytest.raises(RunError) as found, explained_write_errors('b.pth', None):
        raise OSError('of a network')
    assert str(found.value) == f'b.pth could not be written: of a network. {again}'
    with pytest.raises(ValueError), explained_write_errors('b.pth', None):
        raise ValueError


def test_files_of_the_backend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend, opened = AtomicLocalBackend(), []
    replace = os.replace
    monkeypatch.setattr(os, 'replace', lambda part, path: opened.append(str(part)) or replace(part, path))
    backend.put(b'whole', 'plain.bin')
    backend.put_text('Größe', tmp_path / 'a' / 'b' / 'text')
    backend.put_text('ß', 'latin', encoding='latin-1')
    assert (tmp_path / 'plain.bin').read_bytes() == b'whole'
    assert (tmp_path / 'a' / 'b' / 'text').read_bytes() == 'Größe'.encode() and (
        tmp_path / 'latin'
    ).read_bytes() == b'\xdf'
    # one name a target: a process that is killed leaves one file at most
    assert opened == ['plain.bin.part', f'{tmp_path}/a/b/text.part', 'latin.part']


def test_only_the_plain_hook_is_swapped_and_keeps_its_place():
    class Own(CheckpointHook):
        pass

    plain, own = CheckpointHook(interval=7, filename_tmpl='x_{}.pth'), Own()
    plain.priority = 'LOW'
    runner = SimpleNamespace(_hooks=[own, plain, SafeCheckpointHook()])
    CheckpointGuardHook().before_run(runner)
    assert runner._hooks[0] is own and [type(hook) for hook in runner._hooks[1:]] == [SafeCheckpointHook] * 2
    safe = runner._hooks[1]
    assert (safe.interval, safe.filename_tmpl, safe.priority) == (7, 'x_{}.pth', 'LOW')


@pytest.mark.parametrize('backend_args', [None, dict(backend='local')])
def test_a_storage_that_the_config_chose_stays(tmp_path, backend_args):
    hook = SafeCheckpointHook(interval=1, backend_args=backend_args)
    make_runner(tmp_path, [], default_hooks=dict(checkpoint=hook)).train()
    kind = AtomicLocalBackend if backend_args is None else LocalBackend
    assert type(hook.file_backend) is kind
    assert hook.backend_args == (backend_args or dict(backend=ATOMIC_BACKEND))


def test_how_a_checkpoint_is_saved(tmp_path, monkeypatch):
    """Every setting of the hook reaches MMEngine; by_epoch adds one to the count that is saved."""
    settings = dict(
        interval=2, by_epoch=False, save_optimizer=False, save_param_scheduler=False, filename_tmpl='at_{}.pth'
    )
    hook = SafeCheckpointHook(**settings, out_dir=str(tmp_path / 'out'), max_keep_ckpts=2, extra='given')
    calls = []
    runner = make_runner(tmp_path / 'work', [], dict(by_epoch=False, max_iters=6), default_hooks=dict(checkpoint=hook))
    save = runner.save_checkpoint
    monkeypatch.setattr(
        runner,
        'save_checkpoint',
        lambda out_dir, name, *args, extra, **kwargs: (
            calls.append((name, extra, kwargs)) or save(out_dir, name, **kwargs)
        ),
    )
    runner.train()
    assert [(name, extra) for name, extra, _ in calls] == [(f'at_{i}.pth', 'given') for i in (2, 4, 6)]
    for _, _, kwargs in calls:
        del kwargs['meta']
        assert kwargs == dict(
            save_optimizer=False,
            save_param_scheduler=False,
            by_epoch=False,
            backend_args=dict(backend=ATOMIC_BACKEND),
        )
    assert files(tmp_path / 'out' / 'work') == ['at_4.pth', 'at_6.pth']
    last = f'{tmp_path}/out/work/at_6.pth'
    assert (tmp_path / 'work' / 'last_checkpoint').read_text() == last == hook.last_ckpt
    assert runner.message_hub.get_info('keep_ckpt_ids') == [4, 6]
    saved = load_file(tmp_path / 'out' / 'work' / 'at_6.pth')
    assert saved['meta']['iter'] == 6 and 'optimizer' not in saved
    # what a run that resumes is told
    assert saved['message_hub']['runtime_info']['keep_ckpt_ids'] == [4, 6]
    assert saved['message_hub']['runtime_info']['last_ckpt'] == last


def test_folders_that_were_checkpoints_go_too(tmp_path):
    """DeepSpeed writes them."""
    hook = SafeCheckpointHook()
    hook.file_backend = LocalBackend()
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'x').touch()
    (tmp_path / 'file').touch()
    deferred = _DeferRemoval(hook.file_backend)
    deferred.remove(str(tmp_path / 'file'))
    deferred.rmtree(str(tmp_path / 'folder'))
    assert deferred.isfile(str(tmp_path / 'file')) and deferred.isdir(str(tmp_path / 'folder'))
    backend, paths = hook.file_backend, [str(tmp_path / name) for name in ('file', 'folder')]
    assert deferred.outdated == [(backend.remove, paths[0]), (backend.rmtree, paths[1])]
    for remove, path in deferred.outdated:
        remove(path)
    assert not list(tmp_path.iterdir())
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'file').touch()
    for name in ('folder', 'file', 'nothing'):
        hook._remove(str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_what_has_become_the_best_again_is_not_removed(monkeypatch):
    """Of several metrics as well; after an error nothing is removed, and the storage is the hook's own again."""
    removed, fails = [], []
    hook = SafeCheckpointHook()
    hook.file_backend = backend = SimpleNamespace(remove=removed.append, rmtree=lambda path: removed.append([path]))

    def save(self, runner, metrics):
        for name in 'abcd':
            self.file_backend.remove(name)
        self.file_backend.rmtree('e')
        if fails:
            raise OSError(28, 'No space left on device')
        self.best_ckpt_path_dict, self.best_ckpt_path = dict(acc='a', loss='c'), 'd'

    monkeypatch.setattr(CheckpointHook, '_save_best_checkpoint', save)
    hook._save_best_checkpoint(None, {})
    assert removed == ['b', ['e']] and hook.file_backend is backend
    fails.append(True)
    with pytest.raises(RunError) as found:
        hook._save_best_checkpoint(None, {})
    assert str(found.value) == (
        'the best checkpoint could not be written: No space left on device. The previous checkpoint d is intact. Make '
        'room and start again with --resume.'
    )
    assert removed == ['b', ['e']] and hook.file_backend is backend


def test_one_process_names_and_removes_checkpoints(tmp_path, monkeypatch):
    """MMEngine sees to it that one writes them."""
    monkeypatch.setattr(checkpointing, 'is_main_process', lambda: False)
    runner = make_runner(tmp_path, GUARD, **checkpoint_cfg(max_keep_ckpts=1))
    runner.train()
    assert files(tmp_path) == ['epoch_1.pth', 'epoch_2.pth']
    assert runner.message_hub.get_info('keep_ckpt_ids') == [2]  # what all of them save


def test_a_step_that_is_saved_again_counts_once(tmp_path):
    """As by a run that resumes before it; what was first kept goes first, step 0 included."""
    hook, told, saved = SafeCheckpointHook(filename_tmpl='x_{}.pth', max_keep_ckpts=2), {}, []
    hook.out_dir, hook.file_backend, hook.file_client_args = str(tmp_path), LocalBackend(), 'given'
    hook.last_ckpt, hook.keep_ckpt_ids = None, [0, 1]
    runner = SimpleNamespace(
        work_dir=str(tmp_path),
        message_hub=SimpleNamespace(update_info=told.__setitem__),
        save_checkpoint=lambda *args, meta, **_: saved.append((args, meta)) or (tmp_path / args[1]).touch(),
    )
    (tmp_path / 'x_0.pth').touch()
    for step, kept in ((1, [0, 1]), (2, [1, 2]), (1, [2, 1])):
        hook._save_checkpoint_with_step(runner, step, dict(step=step))
        assert list(hook.keep_ckpt_ids) == told['keep_ckpt_ids'] == kept
        assert files(tmp_path) == ['last_checkpoint', *(f'x_{i}.pth' for i in sorted(kept))]
        assert saved.pop() == ((str(tmp_path), f'x_{step}.pth', 'given'), dict(step=step))
    assert told['last_ckpt'] == str(tmp_path / 'x_1.pth')
