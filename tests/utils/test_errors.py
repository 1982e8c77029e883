# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

import pytest

from mmlinattn.utils import errors
from mmlinattn.utils.errors import CheckpointError, CheckpointNotFoundError, RunError, closest, described, printable


def test_the_closest_name():
    names = dict(bbox_mAP='coco/bbox_mAP', grad_clip='clip_grad', clip_gard='clip_grad', zero=None)
    assert {name: closest(name, ['clip_grad', 'coco/bbox_mAP', 'bbox_mAP_50']) for name in names} == names


def test_printable_lines():
    assert printable('  a\n\tb \x1b[2J\x07 ü ') == 'a b \\x1b[2J\\x07 ü'
    assert str(CheckpointError('a\nb')) == str(CheckpointNotFoundError('a\nb')) == 'a b'
    assert isinstance(CheckpointNotFoundError('a'), FileNotFoundError) and isinstance(CheckpointError('a'), RunError)


def test_the_last_line(monkeypatch, capsys):
    print('of stdout')
    errors.say_last('error: x')
    assert capsys.readouterr() == ('of stdout\n', 'error: x\n')
    for gone in ('stdout', 'stderr'):
        monkeypatch.setattr(f'sys.{gone}', None)  # as after `>&-`
        errors.say_last('error: y')
        monkeypatch.undo()


def test_errors_without_a_message():
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert described(caught.value) == 'AssertionError: raise AssertionError'
    assert described(AssertionError()) == 'AssertionError'
