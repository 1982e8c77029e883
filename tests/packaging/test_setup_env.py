# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/setup_env.sh: what it refuses at once, what it installs, and when it has nothing to do.

The long way is walked with a stand-in Python that writes down every pip call instead of obeying it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """#!{python} -SE
import os, pathlib, shutil, subprocess, sys
args, state = sys.argv[1:], pathlib.Path({state!r})
calls = state / 'calls'
with calls.open('a') as file:
    forbidden = ' without byte code' if 'PYTHONDONTWRITEBYTECODE' in os.environ else ''
    file.write(' '.join(args).replace('\\n', ';') + forbidden + '\\n')
if args[:2] == ['-m', 'venv']:
    (pathlib.Path(args[-1]) / 'bin').mkdir(parents=True)
    shutil.copy(__file__, os.path.join(args[-1], 'bin', 'python'))
    open(os.path.join(args[-1], 'pyvenv.cfg'), 'w').close()
elif args[0] == '-' and args[1] in ('openmmlab', 'onedl') or 'sysconfig' in args[1]:
    sys.exit(subprocess.call([{python!r}, *args]))
elif args[0] == '-' and 'mmcv.ops' in args and (state / 'stale-mmcv').exists():
    print('undefined symbol: _ZN5torch', file=sys.stderr)
    sys.exit(1)
elif '--no-cache-dir' in args and 'mmcv' in args:
    (state / 'stale-mmcv').unlink()
elif args[0].endswith('build_mmcv.py'):
    if (state / 'no-joining').exists():
        sys.exit(1)
    wheel = state / (args[1].replace('==', '-') + '.whl')
    wheel.touch()
    print(wheel)
elif 'importlib.metadata' in args[1]:
    sys.exit(not (state / 'holds-other-stack').exists())
elif args[:3] == ['-m', 'pip', 'config']:
    sys.exit(1)
"""

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason='the tested versions need Python 3.11'),
    pytest.mark.skipif(os.name == 'nt', reason='a bash script'),
]


def setup_env(*arguments, root=ROOT, **environment):
    """Runs the script without the pip settings and the module path of this machine; ``environment`` adds to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith('PIP_')}
    for name in ('MMLINATTN_USE_EXISTING_ENV', 'PYTHONPATH'):
        kept.pop(name, None)
    kept.update(PIP_CONFIG_FILE=os.devnull, **environment)
    command = ['bash', str(root / 'tools' / 'setup_env.sh'), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=kept, timeout=120)


def refused(done) -> str:
    """The error line of a run that has to fail with exactly one and print no path."""
    assert done.returncode != 0
    assert done.stdout == ''
    (line,) = [line for line in done.stderr.splitlines() if 'ERROR' in line]
    return line


class Machine:
    """A checkout of its own, a stand-in Python, and what became of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.state, self.venv = folder / 'root', folder / 'state', folder / 'venv'
        self.state.mkdir()
        (self.root / 'tools').mkdir(parents=True)
        shutil.copy(ROOT / 'tools' / 'setup_env.sh', self.root / 'tools')
        shutil.copytree(ROOT / 'requirements', self.root / 'requirements')
        self.python = folder / 'python'
        self.python.write_text(FAKE_PYTHON.format(python=sys.executable, state=str(self.state)))
        self.python.chmod(0o755)

    def setup(self, *arguments, **environment):
        python = ('--python', self.python, '--venv', self.venv)
        return setup_env(*python, *arguments, root=self.root, **environment)

    def calls(self) -> list:
        """Calls of the stand-in since the last time this was asked for."""
        lines = (self.state / 'calls').read_text().splitlines()
        (self.state / 'calls').unlink()
        return lines

    def installs(self) -> list:
        marker = '-m pip install '
        return [line[len(marker) :] for line in self.calls() if line.startswith(marker)]


@pytest.fixture
def machine(tmp_path):
    if not all(map(shutil.which, ('gcc', 'g++'))):
        pytest.skip('needs gcc and g++')
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ('stack', 'mmcv', 'version'), [('openmmlab', 'mmcv', '2.1.0'), ('onedl', 'onedl-mmcv', '2.3.6')]
)
def test_installs_the_locked_stack_and_prints_only_the_path(machine, stack, mmcv, version):
    """Byte code is kept where a container forbids it, or each start of a tool compiles all that it imports."""
    done = machine.setup('--stack', stack, PYTHONDONTWRITEBYTECODE='1')
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{machine.venv}/bin/python\n'
    assert 'about 2 minutes' in done.stderr and '6 to 8 minutes' not in done.stderr
    calls = machine.calls()
    assert [line.endswith('without byte code') for line in calls if 'mmdet.apis' in line] == [False]
    installs = [line.partition('-m pip install ')[2] for line in calls if '-m pip install ' in line]
    # Every call is bound to the lock, whatever else the user's pip settings offer.
    lock = machine.root / 'requirements' / ('lock.txt' if stack == 'openmmlab' else 'lock-onedl.txt')
    assert all(f'-c {lock}' in line for line in installs)
    wheel = f'--force-reinstall --no-deps {machine.state}/{mmcv}-{version}.whl'
    order = ['torch torchvision', wheel, f' {mmcv}', f'-r {lock}', f'--no-deps -e {machine.root}']
    assert [text in line for text, line in zip(order, installs)] == [True] * 5
    assert len(installs) == 5


@pytest.mark.parametrize('environment', [{}, dict(FORCE_CUDA='1')], ids=['it fails', 'CUDA operators'])
def test_mmcv_builds_in_its_own_way_where_files_cannot_be_joined(machine, environment):
    if not environment:
        (machine.state / 'no-joining').touch()
    done = machine.setup(**environment)
    assert done.returncode == 0 and '6 to 8 minutes' in done.stderr, done.stderr
    installs = machine.installs()
    assert installs[1].endswith(' mmcv') and len(installs) == 4


def test_second_run_installs_nothing_and_a_new_lock_does(machine):
    """The other stack is never put beside the first."""
    machine.setup()
    machine.calls()
    done = machine.setup('--quiet')
    assert done.stdout == f'{machine.venv}/bin/python\n' and done.stderr == ''
    assert not [line for line in machine.calls() if 'pip' in line]
    with (machine.root / 'requirements' / 'lock.txt').open('a') as file:
        file.write('# changed\n')
    assert machine.setup().returncode == 0
    assert len(machine.installs()) == 5
    (machine.state / 'holds-other-stack').touch()
    assert "already holds 'mmcv'" in refused(machine.setup('--stack', 'onedl'))
    assert machine.installs() == []


def test_mmcv_built_for_another_torch_is_compiled_anew(machine):
    (machine.state / 'stale-mmcv').touch()
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert 'compiling it anew' in done.stderr
    (again,) = [line for line in machine.installs() if '--no-cache-dir' in line]
    assert again.endswith('--force-reinstall --no-deps mmcv')
    # The wheel that does not work is not taken again.
    assert not (machine.state / 'mmcv-2.1.0.whl').exists()


@pytest.mark.parametrize(
    ('compiler', 'words'),
    [('no-such-g++', ["compiler 'no-such-g++' not found", 'build-essential']), ('false', ['headers in /'])],
)
def test_what_a_compilation_lacks_is_found_before_anything_is_made(machine, compiler, words):
    line = refused(machine.setup(CXX=compiler))
    assert all(word in line for word in words) and not machine.venv.exists()


def test_unreachable_index_is_one_line_without_the_password(tmp_path):
    index = 'http://user:secret@127.0.0.1:9/simple'
    done = setup_env('--venv', tmp_path / 'venv', '--python', sys.executable, PIP_INDEX_URL=index)
    assert 'package index http://127.0.0.1:9/simple' in refused(done)
    assert 'secret' not in done.stderr
    assert not (tmp_path / 'venv').exists()


def test_folder_of_other_work_is_left_alone(machine):
    machine.venv.mkdir()
    (machine.venv / 'thesis.tex').touch()
    assert 'is no virtual environment' in refused(machine.setup())
    assert [path.name for path in machine.venv.iterdir()] == ['thesis.tex']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('--stack mmlab', "--stack is 'mmlab', allowed are: openmmlab, onedl"),
        ('--stack', '--stack needs a value'),
        ('--venev x', "unknown argument '--venev'"),
    ],
)
def test_wrong_arguments(arguments, message):
    assert message in refused(setup_env(*arguments.split()))


def test_existing_environment_is_told_what_it_lacks(tmp_path):
    bare = tmp_path / 'bare'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(bare)], check=True)
    before = sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)
    for how in (dict(), dict(MMLINATTN_USE_EXISTING_ENV='1')):
        done = setup_env(
            *([] if how else ['--use-existing']), PATH=f'{bare}/bin{os.pathsep}{os.environ["PATH"]}', **how
        )
        assert 'nothing was installed' in refused(done)
        assert 'torch does not work: No module named' in done.stderr and f'-e {ROOT}' in done.stderr
    assert before == sorted(path for path in bare.rglob('*') if '__pycache__' not in path.parts)


@pytest.mark.slow
def test_existing_environment_that_has_all_is_used():
    for module in ('mmdet', 'mmseg', 'mmpretrain', 'ftfy', 'regex'):
        pytest.importorskip(module)
    # a module path is a part of what is at hand: these tests may have all from there
    paths = os.environ.get('PYTHONPATH', '')
    done = setup_env('--use-existing', '--python', sys.executable, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f'{sys.executable}\n'
