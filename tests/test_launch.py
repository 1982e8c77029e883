# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""tools/launch.py ends as its processes do; whole runs are in test_cli_stopping.py."""

import os
import runpy
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TOOL = Path(__file__).resolve().parents[1] / 'tools' / 'launch.py'


def failed(exitcode):
    """The second of two processes ended first, with an exit code or minus the number of a signal."""
    error = ChildFailedError.__new__(ChildFailedError)
    error.get_first_failure = lambda: (1, SimpleNamespace(exitcode=exitcode, pid=4321))
    return error


@pytest.mark.parametrize(
    'end, status, line',
    [
        (None, 0, ''),
        (SignalException('stopped', signal.SIGTERM), 143, ''),
        (SignalException('stopped', signal.SIGINT), 130, ''),
        (failed(1), 1, ''),
        (failed(143), 143, ''),
        (failed(-9), 137, 'error: process 1 of the run (pid 4321) was ended by signal 9.\n'),
    ],
    ids=['good', 'SIGTERM', 'SIGINT', 'exit status 1', 'exit status 143', 'killed'],
)
def test_the_exit_status_is_that_of_the_run(monkeypatch, capsys, end, status, line):
    called = []

    def torchrun(arguments):
        called.append(arguments)
        if end is not None:
            raise end

    monkeypatch.setenv('MMLINATTN_LAUNCHED', 'of a run before')
    run = runpy.run_path(str(TOOL))['run']
    monkeypatch.setitem(run.__globals__, 'main', torchrun)
    before = time.time()
    assert run(['--nproc_per_node=2', 'train.py']) == status
    assert called == [['--nproc_per_node=2', 'train.py']]
    assert capsys.readouterr().err == line
    assert before <= float(os.environ['MMLINATTN_LAUNCHED']) <= time.time()
