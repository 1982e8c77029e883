# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Data sets are written as a whole or not at all."""

import hashlib
from pathlib import Path

import cv2
import pytest
from helpers.tool_runs import in_this_process

from mmlinattn.tooling.datasets import COCO_CLASSES, DatasetSpec, write_dataset
from mmlinattn.tooling.datasets.writer import NOTE, STAGING

TOOL = 'make_shapes_dataset.py'
SMALL = DatasetSpec('coco', 3, 2, size=(64, 64))


def digest(folder):
    files = sorted(path for path in Path(folder).rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() for path in files}


def test_an_image_depends_on_its_number_split_and_seed_alone(tmp_path):
    spec = dict(format='coco', size=(64, 64))
    for name, numbers in {'one': (6, 3, 3), 'again': (6, 3, 3), 'fewer': (4, 2, 3), 'other': (6, 3, 4)}.items():
        write_dataset(tmp_path / name, DatasetSpec(num_train=numbers[0], num_val=numbers[1], seed=numbers[2], **spec))
    one, again, fewer, other = (digest(tmp_path / name) for name in ('one', 'again', 'fewer', 'other'))
    images = [name for name in one if name.endswith('.jpg')]
    assert one == again and len({one[name] for name in images}) == len(images) == 9
    assert all(fewer[name] == one[name] for name in fewer if name.endswith('.jpg'))
    assert all(other[name] != one[name] for name in images)


def test_sides_of_images(tmp_path):
    write_dataset(tmp_path, DatasetSpec('coco', 12, 1, size=(64, 120), size_jitter=0.25))
    sizes = [cv2.imread(str(path)).shape[:2] for path in sorted((tmp_path / 'train2017').iterdir())]
    assert {width for _, width in sizes} == {64}  # the least
    assert all(90 <= height <= 120 for height, _ in sizes) and len(set(sizes)) > 6


@pytest.mark.parametrize('content', ['train2017/mine.jpg', 'somebody.txt', NOTE])
def test_existing_files_stay(tmp_path, content):
    (tmp_path / content).parent.mkdir(exist_ok=True)
    (tmp_path / content).write_text('{"content": "precious"}')
    before = digest(tmp_path)
    with pytest.raises(FileExistsError, match=f'holds ({content.partition("/")[0]}|a data set of other settings), '):
        write_dataset(tmp_path, SMALL)
    assert digest(tmp_path) == before


@pytest.mark.parametrize('is_there', [False, True])
def test_a_run_that_fails_leaves_nothing(tmp_path, is_there):
    out, seen = tmp_path / 'new' / 'out', []
    if is_there:
        out.mkdir(parents=True)

    def fail():
        seen.extend(path.name for path in out.iterdir())
        raise KeyError

    with pytest.raises(KeyError):
        write_dataset(out, SMALL, fail)
    assert seen == [STAGING] and out.exists() == is_there and not digest(tmp_path)


def test_a_data_set_that_is_partly_moved_is_none(tmp_path, monkeypatch):
    rename = Path.rename

    def fail(path, target):
        if path.name == 'val2017':
            raise OSError('full')
        rename(path, target)

    monkeypatch.setattr(Path, 'rename', fail)
    with pytest.raises(OSError, match='full'):
        write_dataset(tmp_path, SMALL)
    monkeypatch.undo()
    with pytest.raises(FileExistsError, match='it holds annotations'):
        write_dataset(tmp_path, SMALL)


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        *(('format', 'voc'), ('num_train', 0), ('num_val', 0), ('seed', -1), ('size', (64, 63)), ('size', (64,))),
        *(('size_jitter', 0.51), ('size_jitter', -0.1)),
    ],
)
def test_refused_settings_of_a_data_set(name, value):
    allowed = dict(format='coco', num_train=1, num_val=1, seed=0, size=(64, 8192), size_jitter=0.5)
    DatasetSpec(**allowed)
    with pytest.raises(ValueError, match=f'^{name}=.*: expected '):
        DatasetSpec(**{**allowed, name: value})
    assert DatasetSpec('coco', 1, 1) == DatasetSpec('coco', 1, 1, 0, (160, 160), 0.0)


def test_the_command_line(tmp_path, capsys):
    options = ['--format', 'coco', '--num-train', '3', '--num-val', '2', '--seed', '5', '--size', '96', '64']
    for said in ('wrote ', 'already there, unchanged: '):  # whatever else is there
        in_this_process(TOOL, tmp_path / 'out', *options, '--size-jitter', '0.25')
        out, err = capsys.readouterr()
        assert out.startswith(said + str(tmp_path / 'out')) and str(COCO_CLASSES) in out and not err
        (tmp_path / 'out' / 'mine.txt').touch()
    (tmp_path / 'out' / 'mine.txt').unlink()
    write_dataset(tmp_path / 'direct', DatasetSpec('coco', 3, 2, 5, (96, 64), 0.25))
    assert digest(tmp_path / 'out') == digest(tmp_path / 'direct')
    with pytest.raises(SystemExit, match='1'):
        in_this_process(TOOL, tmp_path / 'out', *options)
    message = capsys.readouterr().err
    assert message.startswith('error: OUT ') and message.count('\n') == 1 and 'has to be empty' in message
