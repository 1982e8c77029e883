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
SETUPTOOLS, OPERATORS = '"setuptools>=77,<82"', str(ROOT / 'mmcv_ops')


def overlay(folder: Path, commands) -> Path:
    """Run uv commands in an environment with packages of its own on top of this one's."""
    view, python = folder / 'view', folder / 'env' / 'bin' / 'python'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'env'], check=True)
    view.mkdir()
    for entry in SITE.iterdir():
        if not entry.name.startswith(NOT_SEEN):
            (view / entry.name).symlink_to(entry)
    (site,) = folder.glob('env/lib/python3*/site-packages')
    (site / 'view.pth').write_text(f"import site; site.addsitedir('{view}')\n")
    own = ' '.join(f'{name}=={version(name).partition("+")[0]}' for name in OWN)
    first = (
        f'install --no-deps {own} opencv-python-headless ftfy',
        f'install --no-deps --no-build-isolation {OPERATORS}',
    )
    for command in (*first, *commands):
        verb, *names = command.split()
        uv = [sys.executable, '-m', 'uv', 'pip', verb, '-q', '--python', python, *names]
        done = subprocess.run(uv, capture_output=True, text=True, env={**os.environ, 'MMCV_WITH_OPS': '0'})
        if done.returncode:
            pytest.skip(f'{command}: {done.stderr[-300:]}')
    return python


def lines(python: Path, env) -> list:
    command = [python, '-W', 'ignore', ROOT / 'tools' / 'check_env.py']
    return subprocess.run(command, capture_output=True, text=True, env=env).stderr.splitlines()


@pytest.mark.parametrize(
    # what was done to the environment, the modules of the lines, parts of the command
    ('commands', 'modules', 'parts'),
    [
        pytest.param(
            ['install onedl-mmcv'],
            ['mmengine', 'mmcv'],
            ['-y onedl-mmengine onedl-mmcv', '"mmcv-lite>=2.1,<2.2"', OPERATORS],
            marks=pytest.mark.slow,
            id='onedl-mmcv',
        ),
        pytest.param(
            ['install --no-deps setuptools>=82 mmcv-lite==2.2.0', 'install transformers>=5', 'uninstall mmdet ftfy'],
            ['mmengine', 'mmcv', 'ftfy', 'mmpretrain.models', 'mmdet'],
            [SETUPTOOLS, 'ftfy', '"transformers>=4.28,<4.52"', '"mmdet>=3.3,<3.4"', '"mmcv-lite>=2.1,<2.2"'],
            marks=pytest.mark.exhaustive,
            id='several',
        ),
    ],
)
def test_the_named_command_mends_it(commands, modules, parts, tmp_path):
    pytest.importorskip('uv')
    if not (SITE / 'mmdet').is_dir():
        pytest.skip('the packages of this Python lie elsewhere')
    python, env = overlay(tmp_path, commands), {**os.environ, 'OMP_NUM_THREADS': '1'}
    env.update(PATH=f'{python.parent}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH='')
    found = lines(python, env)
    described = found[: len(modules)]
    assert [line.partition(' does not work in ')[0] for line in described] == modules, found
    command = found[-1].partition('mend all with: ')[2]
    assert len(found) == len(modules) + 1 and all(part in command for part in parts), found
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert lines(python, env) == []
