# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / 'mmcv_ops' / 'mmcv' / '_ext.py'
# Python files of mmcv.ops need one of the two modules.
collect_ignore_glob = [] if importlib.util.find_spec('mmcv._ext') else ['test_*.py']


@pytest.fixture(scope='session')
def ext():
    """Load the module of this checkout, even beside an installed compiled one."""
    spec = importlib.util.spec_from_file_location('mmcv_ext_of_checkout', FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def used(ext, monkeypatch):
    from helpers import cases

    for user in cases.users():
        monkeypatch.setattr(user, 'ext_module', ext)
