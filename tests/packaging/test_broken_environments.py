# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Environments broken by a later ``pip install``: tools/check_env.py names the command, and the command mends them."""

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()['purelib'])
# installed into each environment, without their requirements; the others are seen from this one
OWN = ('pip', 'setuptools', 'numpy', 'torchvision', 'mmengine', 'mmcv-lite', 'mmpretrain', 'mmdet', 'mmsegmentation')
NOT_SEEN = (*OWN, 'pkg_resources', '_distutils', 'distutils-', 'cv2', 'opencv', 'transformers', 'mmcv', 'mmseg', 'ftfy')
NOT_SEEN += ('mmlinattn_mmcv',)
OPERATORS = str(ROOT / 'mmcv_ops')


def overlay(folder: Path, last: str) -> Path:
    """Run a uv command in an environment with packages of its own on top of this one's."""
    view, python = folder / 'view', folder / 'env' / 'bin' / 'python'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'env'], check=True)
    view.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith(NOT_SEEN):
            (view / entry.name).symlink_to(entry)
    (site,) = folder.glob('env/lib/python3*/site-packages')
    (site / 'view.pth').write_text(f"import site; site.addsitedir('{view}')\n")
    own = ' '.join(f'{name}=={version(name).partition("+")[0]}' for name in OWN)
    first = f'install --no-deps {own} opencv-python-headless ftfy'
    for command in (first, f'install --no-deps --no-build-isolation {OPERATORS}', last):
        verb, *names = command.split()
        uv = [sys.executable, '-m', 'uv', 'pip', verb, '-q', '--python', python, *names]
        done = subprocess.run(uv, capture_output=True, text=True, env={**os.environ, 'MMCV_WITH_OPS': '0'})
        if done.returncode:
            pytest.skip(f'{command}: {done.stderr[-300:]}')
    return python


def lines(python: Path, env) -> list:
    command = [python, '-W', 'ignore', ROOT / 'tools' / 'check_env.py']
    return subprocess.run(command, capture_output=True, text=True, env=env).stderr.splitlines()


@pytest.mark.slow
def test_the_named_command_mends_it(tmp_path):
    pytest.importorskip('uv')
    if not (SITE / 'mmdet').is_dir():
        pytest.skip('the packages of this Python lie elsewhere')
    python, env = overlay(tmp_path, 'install onedl-mmcv'), {**os.environ, 'OMP_NUM_THREADS': '1'}
    env.update(PATH=f'{python.parent}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH='')
    found = lines(python, env)
    assert [line.partition(' does not work in ')[0] for line in found[:-1]] == ['mmengine', 'mmcv'], found
    command = found[-1].partition('mend all with: ')[2]
    parts = '-y onedl-mmengine onedl-mmcv', '"mmcv-lite>=2.1,<2.2"', OPERATORS
    assert all(part in command for part in parts), found
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert lines(python, env) == []
