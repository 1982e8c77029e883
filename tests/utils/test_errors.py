# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.

import pytest

from mmlinattn.utils.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    RunError,
    closest,
    described,
    printable,
    say_last,
)


@pytest.mark.parametrize(
    ('name', 'found'),
    [('bbox_mAP', 'coco/bbox_mAP'), ('grad_clip', 'clip_grad'), ('clip_gard', 'clip_grad'), ('zero', None)],
)
def test_the_closest_name(name, found):
    assert closest(name, ['clip_grad', 'coco/bbox_mAP', 'bbox_mAP_50']) == found


def test_printable_lines():
    assert printable('  a\n\tb \x1b[2J\x07 ü ') == 'a b \\x1b[2J\\x07 ü'
    assert str(CheckpointError('a\nb')) == str(CheckpointNotFoundError('a\nb')) == 'a b'
    assert isinstance(CheckpointNotFoundError('a'), FileNotFoundError) and isinstance(CheckpointError('a'), RunError)


def test_the_last_line(monkeypatch, capsys):
    print('of stdout')
    say_last('error: x')
    assert capsys.readouterr() == ('of stdout\n', 'error: x\n')
    for gone in ('stdout', 'stderr'):
        monkeypatch.setattr(f'sys.{gone}', None)  # as after `>&-`
        say_last('error: y')
        monkeypatch.undo()


def test_errors_without_a_message():
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert described(caught.value) == 'AssertionError: raise AssertionError'
    assert described(AssertionError()) == 'AssertionError'
