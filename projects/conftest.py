# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Tests of projects: ``python -m pytest projects``."""

import random
import sys

import numpy as np
import pytest
import torch
from mmengine.utils import ManagerMixin


@pytest.fixture(autouse=True)
def independent():
    """Seed random numbers before each test; drop MMEngine's global instances (default scope, loggers) after it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    forget_instances(ManagerMixin)


def forget_instances(kind) -> None:
    for child in kind.__subclasses__():
        child._instance_dict.clear()
        forget_instances(child)


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
