# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The Runner of our tools removes no file that a checkpoint names."""

import copy
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import engine_toys
from helpers.engine_toys import At, validation

from mmlinattn.checkpoints import load_file
from mmlinattn.engine import SafeRunner
from mmlinattn.engine.runner import find_latest_checkpoint
from mmlinattn.utils.errors import CheckpointError

make_runner = partial(engine_toys.make_runner, kind=SafeRunner)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('saved')
    make_runner(folder, [], train_cfg=dict(by_epoch=True, max_epochs=1)).train()
    return load_file(folder / 'epoch_1.pth')


@pytest.fixture
def resume(saved, tmp_path, monkeypatch):
    """Resume in ``run`` from a changed checkpoint; return the runner and its warnings."""

    def resume(info=None, parts=None, resumes=True, **checkpoint_hook):
        checkpoint = copy.deepcopy({**saved, **(parts or {})})
        if info:
            checkpoint['message_hub']['runtime_info'].update(info)
            checkpoint['message_hub']['resumed_keys'].update(dict.fromkeys(info, True))
        torch.save(checkpoint, tmp_path / 'given.pth')
        hook = dict(type='CheckpointHook', interval=1, save_best='acc', rule='greater', max_keep_ckpts=1)
        options = dict(load_from=str(tmp_path / 'given.pth'), resume=resumes, **validation())
        runner = make_runner(
            tmp_path / 'run', [], default_hooks=dict(checkpoint={**hook, **checkpoint_hook}), **options
        )
        lines = []
        runner.logger.warning = lines.append
        monkeypatch.setattr('mmengine.logging.message_hub.print_log', lambda line, **_: lines.append(line))
        runner.train()
        return runner, [line for line in lines if 'not checkpoints of this run' in line or 'resumed key' in line]

    return resume


@pytest.fixture
def files(tmp_path):
    """Targets of a hostile checkpoint: a file elsewhere, and files of the run."""
    run, home = tmp_path / 'run', tmp_path / 'home'
    kept = [home / 'best_thesis.pth', run / 'notes.txt']
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('precious')
    (run / 'best_link').symlink_to(home)
    return run, kept


PATHS = ['{home}/best_thesis.pth', '{run}/notes.txt', '{run}/best_link/best_thesis.pth']
PATHS += ['{run}/best_/../../home/best_thesis.pth', ['{home}/best_thesis.pth']]


@pytest.mark.parametrize(
    ('key', 'value', 'score', 'hook'),
    [
        *(('best_ckpt', path, dict(best_score=-1.0), {}) for path in PATHS),
        *(
            ('keep_ckpt_ids', ids, {}, dict(filename_tmpl='../home/{}.pth'))
            for ids in (['/../../home/best_thesis', 1], [-1], {1: 2})
        ),
    ],
    ids=str,
)
def test_foreign_files_that_a_checkpoint_names_stay(resume, files, key, value, score, hook):
    run, kept = files
    if isinstance(value, str):
        value = value.format(home=run.parent / 'home', run=run)
    _, lines = resume({key: value, **score}, **hook)
    assert all(file.read_text() == 'precious' for file in kept)
    assert (run / 'best_link').is_symlink() and len(list(run.glob('best_acc_*'))) == 1
    assert len(lines) == 1 and f'({key})' in lines[0]


def test_a_run_that_only_loads_the_weights_names_no_files(resume):
    runner, lines = resume(dict(best_ckpt='/elsewhere/best_acc.pth'), resumes=False)
    assert runner.iter == 6 and lines == []


def test_processes_that_the_launcher_started_again_resume(tmp_path, monkeypatch):
    monkeypatch.setenv('MMLINATTN_LAUNCHED', '0')
    make_runner(tmp_path, [], train_cfg=dict(by_epoch=True, max_epochs=1)).train()
    trained = []
    runner = make_runner(tmp_path, [At(i, lambda runner: trained.append(runner.iter)) for i in range(6)])
    runner.train()
    assert trained == [3, 4, 5]


@pytest.mark.parametrize('out_dir', [None, 'out'])
def test_older_checkpoints_of_the_run_are_replaced(resume, tmp_path, out_dir):
    folder = tmp_path / (out_dir or '') / 'run'
    folder.mkdir(parents=True)
    for name in ('best_acc_epoch_0.pth', 'epoch_1.pth'):
        (folder / name).touch()
    (tmp_path / 'link').symlink_to(folder)
    info = dict(best_ckpt=str(tmp_path / 'link' / 'best_acc_epoch_0.pth'), best_score=-1.0, keep_ckpt_ids=[1])
    _, lines = resume(info, out_dir=out_dir and str(tmp_path / out_dir))
    assert lines == [] and {path.name for path in folder.glob('*.pth')} == {'best_acc_epoch_2.pth', 'epoch_2.pth'}


def test_a_resumed_run_stores_its_own_config(resume, tmp_path):
    """The text of the older file is not copied into the newer one."""
    runner, _ = resume(dict(cfg='import os', experiment_name='theirs'))
    info = load_file(tmp_path / 'run' / 'epoch_2.pth')['message_hub']['runtime_info']
    assert info['cfg'] == runner.cfg.pretty_text and info['experiment_name'] == runner.experiment_name


@pytest.mark.parametrize('part', ['meta', 'message_hub', 'optimizer', 'state_dict'])
def test_malformed_files_are_one_line(resume, part):
    with pytest.raises(CheckpointError, match='given.pth') as error:
        resume(parts={part: 1})
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('content', ['', 'a\nb', 'x' * 5000, '\x1b[2J', 's3://x/y.pth', '/etc/passwd'])
def test_a_last_checkpoint_of_another_run(tmp_path, content):
    (tmp_path / 'last_checkpoint').write_text(content)
    with pytest.raises(CheckpointError, match='last_checkpoint names .*delete that file') as error:
        find_latest_checkpoint(str(tmp_path))
    assert str(error.value).isprintable()


def test_the_last_checkpoint(tmp_path, monkeypatch):
    work = tmp_path / 'work'
    work.mkdir()
    assert find_latest_checkpoint(str(work)) is None
    (work / 'last_checkpoint').write_text('/gone/before/it/was/moved/epoch_1.pth\n')
    (work / 'epoch_1.pth').touch()
    assert find_latest_checkpoint(str(work)) == str(work / 'epoch_1.pth')
    elsewhere = tmp_path / 'out' / 'work' / 'epoch_2.pth'
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    (work / 'epoch_2.pth').touch()
    (work / 'last_checkpoint').write_text(str(elsewhere))
    # the newer of two of a name: one in a copied folder, or in out_dir after a stop of an earlier run
    for time, newer in ((100, work / 'epoch_2.pth'), (2**32, elsewhere)):
        os.utime(elsewhere, (time, time))
        assert find_latest_checkpoint(str(work)) == str(newer)
    (work / 'epoch_2.pth').unlink()
    assert find_latest_checkpoint(str(work)) == str(elsewhere)
    (work / 'last_checkpoint').write_text('s3://out/work/epoch_2.pth')
    assert find_latest_checkpoint(str(work)) == 's3://out/work/epoch_2.pth'
    monkeypatch.chdir(tmp_path)
    Path('work/last_checkpoint').write_text('work/epoch_1.pth')
    assert find_latest_checkpoint('work') == 'work/epoch_1.pth'


def test_hooks_that_are_switched_off(tmp_path):
    """``visualization`` is none of MMEngine's own."""
    runner = make_runner(tmp_path, [], default_hooks=dict(checkpoint=None, visualization=None))
    runner.train()
    assert runner.iter == 6 and not [*tmp_path.glob('*.pth')]
