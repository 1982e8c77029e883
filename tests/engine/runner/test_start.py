# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One start for all processes."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mmlinattn.engine.runner import start
from mmlinattn.utils.errors import RunError


@pytest.fixture
def processes(monkeypatch):
    """Let other processes answer each question with the given values."""

    def answers(*others, rank=0, chosen=None):
        given = iter(others)
        monkeypatch.setattr(start, 'get_world_size', lambda: 2)
        monkeypatch.setattr(start, 'is_main_process', lambda: rank == 0)
        monkeypatch.setattr(start, 'all_gather_object', lambda own: [own, next(given)][:: 1 - 2 * rank])
        monkeypatch.setattr(start, 'broadcast_object_list', lambda x: x.__setitem__(0, chosen) if rank else None)

    return answers


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.delenv('MMLINATTN_LAUNCHED', raising=False)
    (tmp_path / 'epoch_2.pth').write_bytes(b'weights')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
    os.utime(tmp_path / 'last_checkpoint', (100, 100))
    return tmp_path


@pytest.mark.parametrize(
    ('launched', 'other', 'resumes'),
    [
        ('101', None, True),  # file systems round down
        ('103', '101', True),  # this machine joined again, and the other one was never restarted
        ('103', None, False),  # the checkpoint of an earlier run
        (None, None, False),  # another launcher
    ],
)
def test_a_restart_on_any_machine_resumes(work, monkeypatch, processes, launched, other, resumes):
    if launched:
        monkeypatch.setenv('MMLINATTN_LAUNCHED', launched)
    processes(other, (7, 'b'))
    expected = (str(work / 'epoch_2.pth'), True) if resumes else (None, False)
    assert start.agree_on_start(str(work), None, False) == expected


def test_the_first_process_chooses(work, processes):
    path = str(work / 'epoch_2.pth')
    processes(None, (7, 'a'), rank=1, chosen=(path, True))
    assert start.agree_on_start('elsewhere', None, False) == (path, True)


@pytest.mark.parametrize('size', [None, 8])
def test_a_checkpoint_that_another_machine_lacks(work, processes, size):
    processes(None, (size, 'node2'))
    line = r"epoch_2.pth' of the first process is missing or another file on node2 \(rank 1\). Set --work-dir"
    with pytest.raises(RunError, match=line):
        start.agree_on_start(str(work), str(work / 'epoch_2.pth'), True)


def test_position_and_weights_are_compared(processes, one_process):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    runner = SimpleNamespace(epoch=3, iter=36, model=model)
    here = (3, 36, start._fingerprint(model))
    processes(here)
    start.check_same_start(runner)
    with torch.no_grad():
        model.module.weight[0, 0] += 1e-6
    processes((3, 36, 0))
    start.check_same_start(SimpleNamespace(epoch=3, iter=36, model=model.module))  # its processes may hold parts
    changed = start._fingerprint(model)
    for other in (here, (0, 0, changed)):
        processes(other)
        with pytest.raises(RunError, match=re.escape(f'is {(3, 36, changed)} here and {other} in process 1.')):
            start.check_same_start(runner)
