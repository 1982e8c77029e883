# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from pathlib import Path

import pytest
import torch
from engine_toys import make_runner

from mmlinattn.engine import SafeRunner
from mmlinattn.engine.runner import find_latest_checkpoint
from mmlinattn.utils.errors import CheckpointError


@pytest.fixture
def safe(monkeypatch):
    monkeypatch.setattr('engine_toys.Runner', SafeRunner)


@pytest.fixture
def checkpoint(tmp_path):
    make_runner(tmp_path / 'before', []).train()
    return torch.load(tmp_path / 'before/epoch_2.pth', weights_only=False)


def resume(folder, checkpoint, **kwargs):
    torch.save(checkpoint, folder / 'given.pth')
    runner = make_runner(
        folder / 'work', [], resume=True, load_from=str(folder / 'given.pth'),
        train_cfg=dict(by_epoch=True, max_epochs=4), name='resumed', **kwargs,
    )  # fmt: skip
    runner.train()
    return runner


def test_nothing_outside_of_the_run_is_removed(safe, tmp_path, checkpoint):
    others = tmp_path / 'elsewhere' / 'best_of_all.pth'
    others.parent.mkdir()
    others.write_text('work of years')
    info = checkpoint['message_hub']['runtime_info']
    info.update(
        best_ckpt=str(others), best_score=-1.0, keep_ckpt_ids=['../../elsewhere/x'], cfg='other', experiment_name='x'
    )
    hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=1))
    runner = resume(tmp_path, checkpoint, default_hooks=hooks)
    assert runner.epoch == 4 and others.exists()
    assert runner.message_hub.get_info('experiment_name') != 'x'


def test_a_best_checkpoint_of_the_run_is_known(safe, tmp_path, checkpoint):
    checkpoint['message_hub']['runtime_info']['best_ckpt'] = best = str(tmp_path / 'work/best_acc.pth')
    assert resume(tmp_path, checkpoint).message_hub.get_info('best_ckpt') == best


@pytest.mark.parametrize('part', ['meta', 'message_hub', 'optimizer', 'state_dict'])
def test_files_without_a_part_are_one_line(safe, tmp_path, checkpoint, part):
    checkpoint[part] = 1
    with pytest.raises(CheckpointError, match='given.pth') as error:
        resume(tmp_path, checkpoint)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'content', ['', 'a\nb', 'x' * 5000, '\x1b[2J', 'http://a/work/x.pth', 's3://x/y.pth', '/etc/passwd']
)
def test_a_last_checkpoint_that_is_none_of_the_run(tmp_path, content):
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
    (work / 'last_checkpoint').write_text(str(elsewhere))
    assert find_latest_checkpoint(str(work)) == str(elsewhere)
    (work / 'last_checkpoint').write_text('s3://out/work/epoch_2.pth')
    assert find_latest_checkpoint(str(work)) == 's3://out/work/epoch_2.pth'
    monkeypatch.chdir(tmp_path)
    Path('work/last_checkpoint').write_text('work/epoch_1.pth')
    assert find_latest_checkpoint('work') == 'work/epoch_1.pth'
