# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Files of the distribution beside an installed MMCV, and calls of operators that it lacks."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from mmcv import ops


def test_the_wheel_adds_operators_and_find_loader(tmp_path):
    source = Path(__file__).resolve().parents[2] / 'mmcv_ops'
    shutil.copytree(source, tmp_path / 'source', ignore=shutil.ignore_patterns('build', '*.egg-info', '__pycache__'))
    options = ('--quiet', '--no-build-isolation', '--no-deps', '--no-index', '--wheel-dir', '.')
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', *options, './source'], cwd=tmp_path, check=True)
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as wheel:
        names = {name for name in wheel.namelist() if '.dist-info/' not in name}
        assert names == {'mmcv/_ext.py', 'mmlinattn_mmcv_ops.pth'}
        lines = wheel.read('mmlinattn_mmcv_ops.pth').decode()
    # Python 3.13 warns that `find_loader` will go, and keeps its own
    check = "import sys, pkgutil; own = vars(pkgutil).pop('find_loader', None); sys.version_info = (3, 14)\n"
    check += f'def add_package(): exec({lines!r})\nadd_package()\n'
    check += "assert pkgutil.find_loader is not own and pkgutil.find_loader('no_such_module') is None\n"
    check += "assert pkgutil.find_loader('json').get_filename().endswith('json/__init__.py')"
    subprocess.run([sys.executable, '-S', '-c', check], check=True)


def test_missing_operators_name_caller_and_command(ext):
    assert not hasattr(ext, '__path__')  # as a package has it
    layer = ops.Correlation()
    with pytest.raises(NotImplementedError) as error:
        layer(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4))
    message = str(error.value)
    assert "MMCV's operator correlation_forward" in message and f'{Path(__file__).name}:' in message
    assert message.endswith('bash tools/setup_env.sh --compiled') and '\n' not in message
