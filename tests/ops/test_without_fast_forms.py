# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The package without any fast form: a file that is deleted, not a branch that is not taken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmlinattn

TESTS = Path(__file__).parents[1]
SELECTION = ['attention/test_attention.py', 'attention/test_masks.py', 'layers/test_block.py', 'backbones/test_base.py']


@pytest.mark.slow
def test_the_package_works_when_every_fast_form_is_deleted(tmp_path):
    package = tmp_path / 'mmlinattn'
    shutil.copytree(Path(mmlinattn.__file__).parent, package, ignore=shutil.ignore_patterns('__pycache__', '.mim'))
    deleted = [path for name in ('cpu', 'triton') for path in package.glob(f'ops/*/{name}.py')]
    assert len(deleted) > 5
    for path in deleted:
        path.unlink()
    shutil.copytree(TESTS, tmp_path / 'tests', ignore=shutil.ignore_patterns('__pycache__'))
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-m', 'not slow', '-p', 'no:cacheprovider', *SELECTION],
        cwd=tmp_path / 'tests',
        env={**os.environ, 'PYTHONPATH': str(tmp_path), 'PYTEST_ADDOPTS': '', 'PYTEST_XDIST_WORKER': ''},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert (
        f'{tmp_path}'
        in subprocess.run(
            [sys.executable, '-c', 'import mmlinattn; print(mmlinattn.__file__)'],
            cwd=tmp_path,
            env={**os.environ, 'PYTHONPATH': str(tmp_path)},
            capture_output=True,
            text=True,
        ).stdout
    )
