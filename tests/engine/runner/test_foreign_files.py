# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Nothing that a checkpoint names is removed by the Runner of our tools, whichever checkpoint hook a config has."""

import copy
import logging

import pytest
import torch
from engine_toys import Count, make_runner

from mmlinattn.checkpoints import load_file
from mmlinattn.engine import SafeRunner

SAVE_EACH = dict(checkpoint=dict(type='CheckpointHook', interval=1))
SAVE_BEST = dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='acc', rule='greater', max_keep_ckpts=1))


@pytest.fixture(autouse=True)
def safe(monkeypatch):
    monkeypatch.setattr('engine_toys.Runner', SafeRunner)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A checkpoint of MMEngine's own, after the first of two epochs."""
    folder = tmp_path_factory.mktemp('saved')
    make_runner(folder, [], train_cfg=dict(by_epoch=True, max_epochs=1), default_hooks=SAVE_EACH).train()
    return load_file(folder / 'epoch_1.pth')


@pytest.fixture
def write(saved, tmp_path):
    """Write the checkpoint with changes to its meta or runtime information."""

    def write(folder=tmp_path, meta=None, info=None):
        folder.mkdir(exist_ok=True)
        checkpoint = copy.deepcopy(saved)
        checkpoint['meta'].update(meta or {})
        checkpoint['message_hub']['runtime_info'].update(info or {})
        torch.save(checkpoint, folder / 'epoch_1.pth')
        (folder / 'last_checkpoint').write_text(str(folder / 'epoch_1.pth'))
        return str(folder / 'epoch_1.pth')

    return write


@pytest.fixture
def files(tmp_path):
    """What a hostile checkpoint would like to see gone: a file, a folder, and things of the run itself."""
    (tmp_path / 'home' / 'folder').mkdir(parents=True)
    run = tmp_path / 'run'
    run.mkdir()
    kept = [tmp_path / 'home' / 'best_thesis.pth', tmp_path / 'home' / 'folder' / 'x', run / 'notes.txt']
    for path in kept:
        path.write_text('precious')
    (run / 'best_link').symlink_to(tmp_path / 'home')
    return run, kept


@pytest.mark.parametrize(
    'target, hook',
    [
        ('{home}/best_thesis.pth', 'CheckpointHook'),
        ('{home}/best_thesis.pth', 'SafeCheckpointHook'),
        ('{home}/folder', 'CheckpointHook'),
        ('{run}', 'SafeCheckpointHook'),
        ('{run}/notes.txt', 'CheckpointHook'),
        ('{run}/best_link/best_thesis.pth', 'CheckpointHook'),
        ('{run}/../home/best_thesis.pth', 'SafeCheckpointHook'),
        ('{run}/best_/../../home/best_thesis.pth', 'CheckpointHook'),
        (['{home}/best_thesis.pth'], 'CheckpointHook'),
        (7, 'CheckpointHook'),
        ('\0', 'SafeCheckpointHook'),
    ],
)
def test_best_ckpt_of_a_checkpoint_removes_nothing_of_others(write, files, target, hook, monkeypatch, caplog):
    run, kept = files
    folders = dict(home=str(run.parent / 'home'), run=str(run))
    target = target.format(**folders) if isinstance(target, str) else target
    path = write(run, info=dict(best_ckpt=target, best_score=-1.0))
    default_hooks = dict(checkpoint=dict(SAVE_BEST['checkpoint'], type=hook))
    runner = resumed(run, path, default_hooks)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        notices = []
        patch.setattr(runner.logger, 'warning', notices.append)
        runner.train()
    assert all(file.read_text() == 'precious' for file in kept)
    assert (run / 'best_link').is_symlink() and len(list(run.glob('best_acc_*'))) == 1
    assert len([text for text in notices if 'best_ckpt' in text]) == 1


def resumed(run, path, default_hooks):
    return make_runner(
        run,
        [],
        default_hooks=default_hooks,
        val_dataloader=dict(
            dataset=dict(type='ToyDataset'), sampler=dict(type='DefaultSampler', shuffle=False), batch_size=4
        ),
        val_cfg=dict(),
        val_evaluator=[Count()],
        load_from=path,
        resume=True,
    )


@pytest.mark.parametrize('hook', ['CheckpointHook', 'SafeCheckpointHook'])
def test_its_own_older_best_is_replaced_as_before(write, tmp_path, hook):
    path = write(tmp_path, info=dict(best_ckpt=str(tmp_path / 'best_acc_epoch_0.pth'), best_score=-1.0))
    (tmp_path / 'best_acc_epoch_0.pth').touch()
    resumed(tmp_path, path, dict(checkpoint=dict(SAVE_BEST['checkpoint'], type=hook))).train()
    assert [file.name for file in tmp_path.glob('best_*')] == ['best_acc_epoch_2.pth']


def test_a_folder_for_all_runs_counts_as_the_run_s_own(write, tmp_path):
    run, out = tmp_path / 'run', tmp_path / 'out'
    (out / 'run').mkdir(parents=True)
    older = out / 'run' / 'best_acc_epoch_0.pth'
    older.touch()
    path = write(run, info=dict(best_ckpt=str(older), best_score=-1.0))
    resumed(run, path, dict(checkpoint=dict(SAVE_BEST['checkpoint'], out_dir=str(out)))).train()
    assert not older.exists()


@pytest.mark.parametrize('ids', [['/../../home/best_thesis', 1], '12', [-1], [None], {1: 2}, 5])
def test_kept_checkpoints_are_numbers(write, files, ids):
    run, kept = files
    path = write(run, info=dict(keep_ckpt_ids=ids))
    hook = dict(type='CheckpointHook', interval=1, max_keep_ckpts=1, filename_tmpl='../home/{}.pth')
    make_runner(run, [], default_hooks=dict(checkpoint=hook), load_from=path, resume=True).train()
    assert all(file.read_text() == 'precious' for file in kept)


def test_the_resumed_run_writes_its_own_config_down(write, tmp_path):
    """The text of the older file would travel on to whoever loads the newer one."""
    path = write(info=dict(cfg='import os', experiment_name='theirs'))
    runner = make_runner(tmp_path / 'run', [], default_hooks=SAVE_EACH, load_from=path, resume=True)
    runner.train()
    info = load_file(tmp_path / 'run' / 'epoch_2.pth')['message_hub']['runtime_info']
    assert info['cfg'] == runner.cfg.pretty_text and info['experiment_name'] == runner.experiment_name
