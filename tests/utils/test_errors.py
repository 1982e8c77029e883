# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest

from mmlinattn.utils.errors import CheckpointError, CheckpointNotFoundError, RunError, described, printable, say_last


def test_lines_that_reach_the_terminal():
    assert printable('  a\n\tb \x1b[2J\x07 ü ') == 'a b \\x1b[2J\\x07 ü'
    assert str(CheckpointError('a\nb')) == str(CheckpointNotFoundError('a\nb')) == 'a b'
    assert isinstance(CheckpointNotFoundError('a'), FileNotFoundError) and isinstance(CheckpointError('a'), RunError)


@pytest.mark.parametrize(
    'error, line',
    [
        (KeyError('a is not registered'), 'KeyError: a is not registered'),
        (ValueError('of 3'), 'ValueError: of 3'),
        (TimeoutError(), 'TimeoutError'),
        (KeyError(), 'KeyError'),
    ],
)
def test_errors_of_any_kind(error, line):
    assert described(error) == line


def test_the_last_line(monkeypatch, capsys):
    print('of stdout')
    say_last('error: x')
    assert capsys.readouterr() == ('of stdout\n', 'error: x\n')
    for gone in ('stdout', 'stderr'):
        monkeypatch.setattr(f'sys.{gone}', None)  # as after `>&-`
        say_last('error: y')
        monkeypatch.undo()
