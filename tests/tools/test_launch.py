# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Exit status of tools/launch.py, and arguments of the scripts for torchrun and srun. Whole runs: test_stopping.py."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'launch.py'


class Failed(ChildFailedError):
    """Case in which the second of two processes ends first, with an exit code or minus the number of a signal."""

    def __init__(self, exitcode):
        self.get_first_failure = lambda: (1, SimpleNamespace(exitcode=exitcode, pid=4321))


@pytest.mark.parametrize(
    'end, status, line',
    [
        (None, 0, ''),
        (SignalException('stopped', signal.SIGTERM), 143, ''),
        (Failed(1), 1, ''),
        (Failed(-9), 137, 'error: process 1 of the run (pid 4321) was ended by signal 9.\n'),
    ],
    ids=['good', 'SIGTERM', 'exit status 1', 'killed'],
)
def test_the_exit_status_is_that_of_the_run(monkeypatch, capsys, end, status, line):
    torchrun = mock.Mock(side_effect=end)
    monkeypatch.setenv('MMLINATTN_LAUNCHED', 'of a run before')
    run = runpy.run_path(str(TOOL))['run']
    monkeypatch.setitem(run.__globals__, 'main', torchrun)
    before = time.time()
    assert run(['--nproc_per_node=2', 'train.py']) == status
    torchrun.assert_called_once_with(['--nproc_per_node=2', 'train.py'])
    assert capsys.readouterr().err == line
    assert before <= float(os.environ['MMLINATTN_LAUNCHED']) <= time.time()


# ------------------------------------------------------------------------------------ the scripts

TOOLS = TOOL.parent
# a fake Python that knows the number of GPUs and free ports, and records its command
PYTHON = f"""#!/bin/bash
case $1 in
-) if [ "$2" = "${{PROBED:-}}" ]; then exec {sys.executable} -SE "$@"; fi ;;
-c) echo "${{GPUS_HERE:-0}}" ;;
*) printf '%s\\n' "PYTHONPATH=$PYTHONPATH" "TORCH=${{TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-}}" "$@" ;;
esac
"""
SRUN = """#!/bin/bash
printf '%s\\n' "PYTHONPATH=$PYTHONPATH" "$@"
"""
VARIABLES = (
    'NNODES NODE_RANK MASTER_ADDR PORT MAX_RESTARTS GPUS GPUS_PER_NODE CPUS_PER_TASK SRUN_ARGS PYTHON PYTHONPATH'
)


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script with fake Python and srun, and returns status, lines and errors."""
    for name, text in (('python', PYTHON), ('srun', SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(name, *words, **environment):
        kept = {key: value for key, value in os.environ.items() if key not in VARIABLES.split()}
        kept.update(environment, PATH=f'{tmp_path}:{os.environ["PATH"]}')
        command = ['bash', str(TOOLS / name), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=kept, timeout=60)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


ONE = ['--node_rank=0', '--master_addr=127.0.0.1', '--master_port=29500']
SEVERAL = dict(NNODES='3', NODE_RANK='1', MASTER_ADDR='first', PORT='1234')
RESTARTS = ['--max_restarts=2', '--rdzv_backend=c10d']


@pytest.mark.parametrize(
    ('environment', 'nodes', 'rendezvous'),
    [
        ({}, 1, ONE),
        (SEVERAL, 3, ['--node_rank=1', '--master_addr=first', '--master_port=1234']),
        (dict(SEVERAL, MAX_RESTARTS='2'), 3, [*RESTARTS, '--rdzv_endpoint=first:1234', '--rdzv_conf=is_host=0']),
    ],
    ids=['alone', 'machines', 'machines and restarts'],
)
def test_arguments_of_torchrun(script, environment, nodes, rendezvous):
    store = '1' if RESTARTS[0] in rendezvous else ''
    launched = [str(TOOL), f'--nnodes={nodes}', '--nproc_per_node=2', *rendezvous]
    for name, own in (('train', ['config.py']), ('test', ['config.py', 'last.pth'])):
        status, lines, said = script(f'dist_{name}.sh', *own, 2, '--work-dir', 'a b', GPUS_HERE='2', **environment)
        assert (status, said) == (0, '')
        begins = [f'PYTHONPATH={TOOLS}/..', f'TORCH={store}', *launched]
        assert lines == [*begins, f'{TOOLS / name}.py', *own, '--launcher', 'pytorch', '--work-dir', 'a b']


def test_processes_and_gpus(script):
    status, lines, said = script('dist_train.sh', 'config.py', 3, PYTHONPATH='/mine')
    assert (status, said) == (0, 'notice: no GPU here, 3 processes on the CPU over gloo.\n')
    assert '--nproc_per_node=3' in lines and lines[0] == f'PYTHONPATH={TOOLS}/..:/mine'
    status, lines, said = script('dist_train.sh', 'config.py', 3, GPUS_HERE='2')
    assert (status, lines, said) == (1, [], 'error: 3 GPUs asked for, and this machine has 2.\n')
    for number, environment, wrong in (
        (0, {}, "GPUS='0': expected a number of at least 1"),
        ('2.0', {}, "GPUS='2.0': expected a number of at least 1"),
        (1, dict(MAX_RESTARTS='-1'), "MAX_RESTARTS='-1': expected a number of at least 0"),
        (1, dict(NODE_RANK='08', CDPATH='.:/'), "NODE_RANK='08': expected a number of at least 0"),
    ):
        status, lines, said = script('dist_train.sh', 'config.py', number, **environment)
        assert (status, lines, said) == (2, [], f'error: {wrong}.\n')


def test_a_port_that_is_taken(script):
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, lines, said = script('dist_train.sh', 'config.py', 1, PORT=port, PROBED=port)
        assert (status, lines) == (1, []) and said.startswith(f'error: PORT = {port} cannot be used (')
        assert said.count('\n') == 1 and said.endswith('in the environment, e.g. PORT=29501.\n')
        assert script('dist_train.sh', 'config.py', 1, PORT=port, PROBED=port, NODE_RANK='1')[0] == 0
    assert script('dist_train.sh', 'config.py', 1, PORT=port, PROBED=port)[0] == 0
    assert script('dist_train.sh', 'config.py', 1, PORT='x', PROBED='x')[0] == 1


@pytest.mark.parametrize(
    ('environment', 'asked'),
    [
        ({}, ['--ntasks=8', '--gres=gpu:8', '--ntasks-per-node=8', '--cpus-per-task=5']),
        (dict(GPUS='2'), ['--ntasks=2', '--gres=gpu:2', '--ntasks-per-node=2', '--cpus-per-task=5']),
        (
            dict(GPUS='8', GPUS_PER_NODE='4', CPUS_PER_TASK='7'),
            ['--ntasks=8', '--gres=gpu:4', '--ntasks-per-node=4', '--cpus-per-task=7'],
        ),
        (dict(GPUS='2', GPUS_PER_NODE='0'), ['--ntasks=2', '--cpus-per-task=5']),
    ],
)
def test_arguments_of_srun(script, environment, asked):
    words = ['gpus', 'my job', 'config.py', 'my work', '--cfg-options', 'a=b c']
    status, lines, said = script('slurm_train.sh', *words, SRUN_ARGS='--time=9 -x n1', PYTHON='other', **environment)
    tool = ['other', '-u', f'{TOOLS}/train.py', 'config.py', '--work-dir=my work', '--launcher=slurm']
    assert (status, said) == (0, '')
    assert lines == [
        *(f'PYTHONPATH={TOOLS}/..', '-p', 'gpus', '--job-name=my job', *asked, '--kill-on-bad-exit=1'),
        *('--time=9', '-x', 'n1', *tool, '--cfg-options', 'a=b c'),
    ]
