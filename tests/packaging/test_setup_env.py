# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Errors of tools/setup_env.sh before it installs anything, and its source of PyTorch. CI tests the rest."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.name == 'nt', reason='a bash script')


def setup_env(*arguments, **environment):
    """Run the script without pip settings and module path of this machine; ``environment`` adds variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')}
    for name in ('MMLINATTN_USE_EXISTING_ENV', 'PYTHONPATH'):
        kept.pop(name, None)
    kept.update(PIP_CONFIG_FILE=os.devnull, **environment)
    command = ['bash', str(ROOT / 'tools' / 'setup_env.sh'), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept, timeout=120)


def error_line(done) -> str:
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
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(tmp_path / 'bare')], check=True)
    return tmp_path / 'bare'


@pytest.mark.parametrize('version', ['3.9.25', '3.15.0'])
def test_python_out_of_range_raises(version, tmp_path):
    numbers = tuple(map(int, version.split('.')))
    code = f'import sys; sys.version_info = {numbers}; exec(sys.argv[1])'
    python = program(tmp_path / 'python', f'exec {sys.executable} -c "{code}" "$2"')
    line = error_line(setup_env('--venv', tmp_path / 'venv', '--python', python))
    assert 'Python 3.10 to 3.14' in line and 'uv python install' in line and not (tmp_path / 'venv').exists()


def test_environments_of_others_are_neither_used_nor_erased(bare, tmp_path):
    answer = '[ "$1" != -V ] || { echo Python 3.10.99; exit; }'
    python = program(bare / 'python', answer, f'exec {sys.executable} "$@"')
    assert 'not Python 3.10.99' in error_line(setup_env('--venv', bare, '--python', python))
    kept = tmp_path / 'venv' / 'lib' / 'python3.8' / 'site-packages' / 'mine.py'
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / 'venv' / 'pyvenv.cfg').touch()
    line = error_line(setup_env('--venv', tmp_path / 'venv', '--python', sys.executable, CDPATH='.:/'))
    assert 'exists and is no environment that this script made' in line and kept.exists()


def test_missing_compiler_and_index_are_refused_first(tmp_path):
    venv, index = tmp_path / 'venv', 'http://user:secret@127.0.0.1:9/simple'
    line = error_line(setup_env('--compiled', '--venv', venv, CXX='no-such-g++'))
    assert "needs 'no-such-g++'" in line and 'build-essential' in line and not venv.exists()
    done = setup_env('--venv', venv, '--python', sys.executable, PIP_INDEX_URL=index)
    assert 'package index http://127.0.0.1:9/simple' in error_line(done) and 'secret' not in done.stderr


def wheel(folder: Path, name: str, version: str, script: str = '') -> None:
    module, page = name.replace('-', '_'), folder / name
    page.mkdir(parents=True, exist_ok=True)
    info = f'{module}-{version}.dist-info'
    with zipfile.ZipFile(page / f'{module}-{version}-py3-none-any.whl', 'w') as archive:
        archive.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
        archive.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        if script:
            entry = zipfile.ZipInfo(f'{module}-{version}.data/scripts/{name}')
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, script)
        archive.writestr(f'{info}/RECORD', '')
    links = [f'<a href="{file.name}">{file.name}</a>' for file in page.glob('*.whl')]
    (page / 'index.html').write_text('\n'.join(links))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('how', 'expected'),
    [
        ('no driver', '9.1+cpu'),
        ('a driver', '9.1'),
        ('no driver, index out of reach', '9.1'),
        ('a driver, --torch URL', '9.1+cpu'),
    ],
)
def test_pytorch_comes_from_the_index_that_fits_the_machine(how, expected, tmp_path):
    """Stand in for PyPI and PyTorch's CPU index by two folders of empty wheels."""
    uv = pytest.importorskip('uv').find_uv_bin()
    if Path('/proc/driver/nvidia/version').exists():
        pytest.skip('this machine has a driver')
    pypi, cpu = tmp_path / 'pypi', tmp_path / 'cpu'
    wheel(pypi, 'uv', '9.1', f'#!/bin/sh\nexec {uv} "$@"\n')
    for name in ('torch', 'torchvision'):
        wheel(pypi, name, '9.1')
        wheel(cpu, name, '9.1+cpu')
    wheel(pypi, 'nvidia-cublas', '9.1')
    lock = tmp_path / 'lock.txt'
    lock.write_text('uv==9.1\ntorch===9.1\ntorchvision===9.1\nnvidia-cublas==9.1\n')
    program(tmp_path / 'nvidia-smi', f'exit {int("a driver" not in how)}')
    mirror = f'file://{tmp_path}/none' if 'reach' in how else f'file://{cpu}'
    source = ['--torch', f'file://{cpu}'] if 'URL' in how else []
    # explicitly over another build
    for options in [['--torch', 'pypi'], source] if source else [[]]:
        done = setup_env(
            *('--venv', tmp_path / 'venv', '--python', sys.executable, '--lock', lock, *options),
            PATH=f'{tmp_path}{os.pathsep}{os.environ["PATH"]}',
            PIP_INDEX_URL=f'file://{pypi}',
            MMLINATTN_TORCH_CPU_INDEX=mirror,
        )
    assert ('cannot be reached: installing' in done.stderr) == ('reach' in how), done.stderr
    # the set-up fails after this step, since the empty wheels lack setuptools
    (site,) = tmp_path.glob('venv/lib/python3*/site-packages')
    found = {path.name.removesuffix('.dist-info') for path in site.glob('*-9.1*.dist-info')}
    cuda = {'nvidia_cublas-9.1'} if expected == '9.1' or source else set()
    assert found == {'uv-9.1', f'torch-{expected}', f'torchvision-{expected}', *cuda}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('--stack mmlab', "--stack='mmlab': expected one of (openmmlab, onedl)"),
        ('--stack', '--stack needs a value'),
        ('--lock=none.txt', "--lock='none.txt': no such file"),
        ('--torch cuda', "--torch='cuda': expected one of (cpu, pypi, the URL of an index)"),
        ('--venev x', "unknown argument '--venev'"),
    ],
)
def test_wrong_arguments(arguments, message):
    assert message in error_line(setup_env(*arguments.split()))


def test_existing_environment_lists_missing_packages(bare):
    before = sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)
    for how in (dict(), dict(MMLINATTN_USE_EXISTING_ENV='1')):
        done = setup_env(*([] if how else ['--use-existing']), PATH=f'{bare}/bin:{os.environ["PATH"]}', **how)
        assert 'nothing was installed' in error_line(done)
        assert re.search(r'] torch does not work in \S+: No module named .* mend it with: pip install', done.stderr)
    assert before == sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)


def test_tool_without_its_packages_ends_in_one_line(bare):
    for tool in [*ROOT.glob('tools/*.py'), *ROOT.glob('tools/*/*.py')]:
        if tool.name in ('check_env.py', 'build_mmcv.py'):  # lists every problem; runs in a finished environment
            continue
        done = subprocess.run([bare / 'bin' / 'python', tool, '--help'], capture_output=True, text=True)
        assert done.returncode == 1, tool
        assert done.stderr == f'error: torch is not installed in {bare}/bin/python: pip install torch torchvision\n'


@pytest.mark.slow
def test_existing_environment_that_has_all_is_used():
    for module in ('mmdet', 'mmseg', 'mmpretrain', 'ftfy', 'regex'):
        pytest.importorskip(module)
    # the tests may get their packages from there
    paths = os.environ.get('PYTHONPATH', '')
    done = setup_env('--use-existing', '--python', sys.executable, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{sys.executable}\n'
