# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/run_tests.sh and tools/quickstart.sh with a Python that only notes its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == 'nt' or not shutil.which('git'), reason='bash scripts and git')


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script; words that contain ``broken`` exit with a status."""
    checkout = tmp_path / 'checkout'
    for name in ('tools', 'requirements'):
        shutil.copytree(ROOT / name, checkout / name)
    subprocess.run('git init -q && git add tools/*.py', shell=True, cwd=checkout, check=True)
    (checkout / 'mine.py').write_text('x' * 200)
    noted = tmp_path / 'noted'

    def start(script, broken, status):
        python = tmp_path / 'bin' / 'python'
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\necho "$*" >> {noted}\ncase "$*" in {broken}) exit {status};; esac\n')
        python.chmod(0o755)
        env = {**os.environ, 'PATH': f'{python.parent}:{os.environ["PATH"]}', 'MMLINATTN_USE_EXISTING_ENV': '1'}
        env.update(CI='', DATA=str(tmp_path / 'data'), WORK_DIR=str(tmp_path / 'work'))
        done = subprocess.run(['bash', checkout / 'tools' / script], capture_output=True, text=True, env=env)
        return done, noted.read_text()

    return start


def test_tests_run_although_the_types_fail(run):
    done, noted = run('run_tests.sh', "'-m mypy'", 1)
    found = {line.split(',')[0].split('  ')[0]: line.split()[-1] for line in done.stderr.splitlines() if ' s  ' in line}
    expected = dict.fromkeys(['lint', 'types', 'fast tests', 'reference backends', 'slow tests'], 'passed')
    assert found == dict(expected, types='FAILED') and done.returncode == 1, done.stderr
    assert 'ruff check' in noted and 'tools/train.py' in noted and 'mine.py' not in noted


@pytest.mark.parametrize(('status', 'said'), [(130, 'stopped. The same command'), (1, 'error: the training failed')])
def test_a_stopped_quickstart_has_not_failed(run, tmp_path, status, said):
    (tmp_path / 'data' / 'annotations').mkdir(parents=True)
    (tmp_path / 'data' / 'annotations' / 'a.json').touch()
    shutil.copytree(ROOT / 'configs' / 'mmdet', tmp_path / 'checkout' / 'configs' / 'mmdet')
    done, _ = run('quickstart.sh', "'tools/train.py '*", status)
    assert said in done.stderr and done.returncode == status, done.stderr
    assert ('failed' in done.stderr) == (status == 1)
