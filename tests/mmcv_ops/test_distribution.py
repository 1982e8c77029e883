# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the distribution adds to an installed MMCV, and what happens to an operator that it does not have."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from mmcv import ops

SOURCE = Path(__file__).resolve().parents[2] / 'mmcv_ops'


def test_the_wheel_adds_one_file(tmp_path):
    shutil.copytree(SOURCE, tmp_path / 'source', ignore=shutil.ignore_patterns('build', '*.egg-info', '__pycache__'))
    options = ('--quiet', '--no-build-isolation', '--no-deps', '--no-index', '--wheel-dir', '.')
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', *options, './source'], cwd=tmp_path, check=True)
    names = zipfile.ZipFile(next(tmp_path.glob('*.whl'))).namelist()
    assert [name for name in names if '.dist-info/' not in name] == ['mmcv/_ext.py']


def test_an_operator_that_is_not_there_says_who_asks_and_what_to_run(ext):
    assert not hasattr(ext, '__path__')  # as a package has it
    layer = ops.Correlation()
    with pytest.raises(NotImplementedError) as error:
        layer(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4))
    message = str(error.value)
    assert "MMCV's operator correlation_forward" in message and f'{Path(__file__).name}:' in message
    assert message.endswith('bash tools/setup_env.sh --compiled') and '\n' not in message
