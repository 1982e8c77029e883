# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Environments broken by a later ``pip install``: tools/check_env.py names the command, and the command mends them."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()['purelib'])
REPLACED = 'setuptools', 'pkg_resources', '_distutils', 'distutils-', 'cv2', 'opencv', 'transformers', 'pip'
HEADLESS = 'opencv-python-headless'
# the modules that break, the packages that break them, the end of the command
BROKEN = {
    'newest setuptools': (['mmengine'], ['setuptools>=82', HEADLESS], 'pip install "setuptools>=77,<82"'),
    'oldest setuptools': (['mmengine'], ['setuptools==60.2.0', HEADLESS], 'pip install "setuptools>=77,<82"'),
    'newest transformers': (
        ['mmpretrain.models', 'mmdet.models'],
        ['setuptools==81.0.0', HEADLESS, 'transformers>=5'],
        'pip install "transformers>=4.28,<4.52"',
    ),
    'no X libraries': (['cv2', 'mmcv'], ['setuptools==81.0.0', 'opencv-python'], 'pip install opencv-python-headless'),
}


def overlay(folder: Path, packages) -> Path:
    """Install packages into a new environment that sees the rest of this one's, which pip then leaves alone."""
    view, python = folder / 'view', folder / 'env' / 'bin' / 'python'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'env'], check=True)
    view.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith(REPLACED):
            (view / entry.name).symlink_to(entry)
    uv = [sys.executable, '-m', 'uv', 'pip', 'install', '-q', '--python', python, 'pip', *packages]
    done = subprocess.run(uv, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'needs a package index: {done.stderr[-200:]}')
    (site,) = folder.glob('env/lib/python3*/site-packages')
    (site / 'view.pth').write_text(f"import site; site.addsitedir('{view}')\n")
    return python


def lines(python: Path, modules, env) -> list:
    """The lines of tools/check_env.py about some modules; all of them take half a minute."""
    code = "import runpy, sys; print(*runpy.run_path(sys.argv[1])['check'](sys.argv[2:]), sep='\\n')"
    command = [python, '-W', 'ignore', '-c', code, ROOT / 'mmlinattn' / 'tooling' / 'environment.py', *modules]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.split('\n')[:-1]


@pytest.mark.slow
@pytest.mark.parametrize('kind', BROKEN)
def test_the_named_command_mends_it(kind, tmp_path):
    pytest.importorskip('uv')
    modules, packages, command = BROKEN[kind]
    if not (SITE / 'mmdet').is_dir():
        pytest.skip('the packages of this Python lie elsewhere')
    if kind == 'oldest setuptools' and sys.version_info < (3, 12):
        pytest.skip('works on this Python')
    python, env = overlay(tmp_path, packages), {**os.environ, 'OMP_NUM_THREADS': '1'}
    env.update(PATH=f'{python.parent}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH='')
    if kind == 'no X libraries':  # hides the one of this machine
        (tmp_path / 'libGL.so.1').touch()
        env['LD_LIBRARY_PATH'] = str(tmp_path)
    (line,) = lines(python, modules, env)
    found = re.search('; mend it with: (.*)', line).group(1)
    assert found.endswith(command)
    subprocess.run(found, shell=True, env=env, check=True, capture_output=True)
    assert lines(python, modules, env) == ['']
