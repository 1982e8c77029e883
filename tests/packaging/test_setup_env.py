# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/setup_env.sh: what it refuses before it installs anything. What it installs, every run of CI sees."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == 'nt', reason='a bash script')


def setup_env(*arguments, **environment):
    """Runs the script without the pip settings and the module path of this machine; ``environment`` adds to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')}
    for name in ('MMLINATTN_USE_EXISTING_ENV', 'PYTHONPATH'):
        kept.pop(name, None)
    kept.update(PIP_CONFIG_FILE=os.devnull, **environment)
    command = ['bash', str(ROOT / 'tools' / 'setup_env.sh'), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept, timeout=120)


def refused(done) -> str:
    """The error line of a run that has to fail with exactly one and print no path."""
    assert done.returncode != 0
    assert done.stdout == ''
    (line,) = [line for line in done.stderr.splitlines() if 'ERROR' in line]
    return line


def program(path, *lines):
    path.write_text('\n'.join(['#!/bin/sh', *lines, '']))
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path):
    """An environment without packages."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(tmp_path / 'bare')], check=True)
    return tmp_path / 'bare'


@pytest.mark.parametrize('version', ['3.8.18', '3.14.0'])
def test_python_that_the_stack_does_not_run_on_is_refused(version, tmp_path):
    numbers = tuple(map(int, version.split('.')))
    code = f'import sys; sys.version_info = {numbers}; exec(sys.argv[1])'
    python = program(tmp_path / 'python', f'exec {sys.executable} -c "{code}" "$2"')
    line = refused(setup_env('--venv', tmp_path / 'venv', '--python', python))
    assert 'Python 3.9 to 3.13' in line and 'find_loader' in line and not (tmp_path / 'venv').exists()


def test_another_python_than_the_one_asked_for_is_not_used(bare):
    answer = '[ "$1" != -V ] || { echo Python 3.10.99; exit; }'
    python = program(bare / 'python', answer, f'exec {sys.executable} "$@"')
    assert 'and --python is Python 3.10.99' in refused(setup_env('--venv', bare, '--python', python))


def test_an_environment_of_somebody_else_is_not_erased(tmp_path):
    """Of a Python that does not fit, say."""
    kept = tmp_path / 'venv' / 'lib' / 'python3.8' / 'site-packages' / 'mine.py'
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / 'venv' / 'pyvenv.cfg').touch()
    line = refused(setup_env('--venv', tmp_path / 'venv', '--python', sys.executable, CDPATH='.:/'))
    assert 'exists and is no environment that this script made' in line and kept.exists()


def test_missing_compiler_is_told_before_anything_is_made(tmp_path):
    line = refused(setup_env('--compiled', '--venv', tmp_path / 'venv', CXX='no-such-g++'))
    assert "needs 'no-such-g++'" in line and 'build-essential' in line and not (tmp_path / 'venv').exists()


def test_unreachable_index_is_one_line_without_the_password(tmp_path):
    index = 'http://user:secret@127.0.0.1:9/simple'
    done = setup_env('--venv', tmp_path / 'venv', '--python', sys.executable, PIP_INDEX_URL=index)
    assert 'package index http://127.0.0.1:9/simple' in refused(done)
    assert 'secret' not in done.stderr


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('--stack mmlab', "--stack is 'mmlab', allowed are: openmmlab, onedl"),
        ('--stack', '--stack needs a value'),
        ('--lock=none.txt', "--lock is 'none.txt', which is no file"),
        ('--venev x', "unknown argument '--venev'"),
    ],
)
def test_wrong_arguments(arguments, message):
    assert message in refused(setup_env(*arguments.split()))


def test_existing_environment_is_told_what_it_lacks(bare):
    before = sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)
    for how in (dict(), dict(MMLINATTN_USE_EXISTING_ENV='1')):
        done = setup_env(
            *([] if how else ['--use-existing']), PATH=f'{bare}/bin{os.pathsep}{os.environ["PATH"]}', **how
        )
        assert 'nothing was installed' in refused(done)
        assert re.search(r'] torch does not work in \S+: No module named .* mend it with: pip install', done.stderr)
    assert before == sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)


def test_tool_without_its_packages_ends_in_one_line(bare):
    for tool in [*ROOT.glob('tools/*.py'), *ROOT.glob('tools/*/*.py')]:
        if tool.name in ('check_env.py', 'build_mmcv.py'):  # lists all; runs in a finished environment
            continue
        done = subprocess.run([bare / 'bin' / 'python', tool, '--help'], capture_output=True, text=True)
        assert done.returncode == 1, tool
        assert done.stderr == f'error: torch is not installed in {bare}/bin/python: pip install torch torchvision\n'


@pytest.mark.slow
def test_existing_environment_that_has_all_is_used():
    for module in ('mmdet', 'mmseg', 'mmpretrain', 'ftfy', 'regex'):
        pytest.importorskip(module)
    # a module path is a part of what is at hand: these tests may have all from there
    paths = os.environ.get('PYTHONPATH', '')
    done = setup_env('--use-existing', '--python', sys.executable, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{sys.executable}\n'
