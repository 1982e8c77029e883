# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import errno
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from engine_toys import Count, make_runner
from mmengine.hooks import CheckpointHook
from mmengine.runner import find_latest_checkpoint

from mmlinattn.engine import AtomicLocalBackend, RunError, SafeCheckpointHook

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
    checkpoint = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    assert checkpoint['meta']['epoch'] == 2
