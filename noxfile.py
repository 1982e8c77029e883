# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run the version matrix of docs/testing.md (``nox``) and write the lock files (``nox -s lock``).

Each session makes an environment below ``.nox/``, runs the fast tests and one train-resume-test round, and prints its
row of the table. ``nox -s "tests(3.13, newest)"`` runs one; sessions without their Python are skipped.
"""

import datetime
import re
import shutil
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = ROOT / 'requirements'
# oldest: the lower bounds of requirements/runtime.txt and mminstall.txt
NEWEST = [(version, 'newest') for version in ('3.11', '3.12', '3.13', '3.14')]
MATRIX = [('3.10', 'oldest'), *NEWEST, ('3.11', 'onedl')]
# lock file -> its oldest Python; all but lock-oldest serve newer ones and every platform too
LOCKS = {'lock': '3.10', 'lock-onedl': '3.10', 'lock-oldest': '3.10', 'lock-newest': '3.11'}
HEADER = """\
# Versions that the tests run with: `nox -s lock` makes this file from {}.in.
# '===' excludes local builds such as 2.14.1+cpu, which do not work with PyPI's torchvision; setup_env.sh --torch cpu
# takes both from PyTorch's index.
"""
VERSIONS = """
import platform, importlib.metadata as m
names = 'torch', 'torchvision', 'numpy'
print(' | '.join([platform.python_version(), *map(m.version, names)]))
"""
nox.options.sessions = ['tests']


@nox.session(venv_backend='none')
@nox.parametrize('version,versions', MATRIX, ids=[f'{version}, {versions}' for version, versions in MATRIX])
def tests(session: nox.Session, version: str, versions: str) -> None:
    python = shutil.which(f'python{version}')
    if python is None or subprocess.run([python, '-c', ''], capture_output=True).returncode:
        session.skip(f'no Python {version} on this machine')
    venv = ROOT / '.nox' / f'{version}-{versions}'
    lock = REQUIREMENTS / f'lock-{versions}.txt'
    setup = ['bash', 'tools/setup_env.sh', '--python', python, '--venv', str(venv), '--lock', str(lock)]
    session.run(*setup, '--stack', 'onedl' if versions == 'onedl' else 'openmmlab', external=True)
    python = str(venv / 'bin' / 'python')
    env = {'OMP_NUM_THREADS': '1'}
    fast = session.run(python, '-m', 'pytest', '-q', '-n', '2', '-m', 'not slow', env=env, silent=True, external=True)
    session.run(
        python, '-m', 'pytest', '-q', '-m', 'roundtrip', 'tests/tools/test_roundtrip.py', env=env, external=True
    )
    found = subprocess.run([python, '-c', VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
    result = re.sub(r' in .*', '', fast.strip().splitlines()[-1]).strip('= ')
    session.log(f'| {found} | {versions} | {datetime.date.today()} | {result}; round passed |')


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve requirements/*.in to the newest releases."""
    session.install('uv')
    for name, python in LOCKS.items():
        source, target = REQUIREMENTS / f'{name}.in', REQUIREMENTS / f'{name}.txt'
        scope = [] if name == 'lock-oldest' else ['--universal']
        options = [*scope, '--python-version', python, '--no-header', '--no-annotate', '--upgrade', '--quiet']
        session.run('uv', 'pip', 'compile', *options, str(source), '--output-file', str(target))
        pins = re.sub(r'^(torch|torchvision)==', r'\1===', target.read_text(), flags=re.MULTILINE)
        target.write_text(HEADER.format(name) + pins)
