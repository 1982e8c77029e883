# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tests of projects: ``python -m pytest projects``."""

import sys

import pytest
from conftest import independent  # noqa: F401  the fixture of tests/


@pytest.fixture
def fails(monkeypatch, capsys):
    """Call a tool's ``main`` and return the one line that it ends with."""

    def call(main, *args):
        monkeypatch.setattr(sys, 'argv', ['tool', *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith('error: ')
        return lines[0]

    return call
