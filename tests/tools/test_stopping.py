# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Runs of several processes that are stopped, killed or spread over machines: they end cleanly and resume exactly.

The config has SyncBN, and a CPU has none."""

import os
import signal
import sys

import psutil
import pytest
import torch
from helpers.tool_runs import HELD, QUICK, TOOLS, free_port, losses, run, start, wait_for

from mmlinattn.tooling.datasets import DatasetSpec, write_dataset

pytest.importorskip('mmpretrain')
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != 'posix', reason='signals')]

NUM_ITERS = 12  # of two processes: 3 epochs of 4 batches
SMALL = """
arch = dict(embed_dims=(16, 16, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
model = dict(backbone=dict(arch=arch, norm_cfg=dict(type='SyncBN')), neck=dict(in_channels=32))
"""
TRAIN = 'bash', TOOLS / 'dist_train.sh', 'config.py'


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('stopping')
    write_dataset(str(folder / 'shapes'), DatasetSpec('imagenet', 24, 12, size=(64, 64)))
    (folder / 'config.py').write_text(HELD.format(base=QUICK['mmpretrain'], batch=3) + SMALL)
    return folder


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes):
    assert psutil.wait_procs(processes, timeout=60)[1] == []


def weights(path):
    return torch.load(path, weights_only=False)['state_dict']


@pytest.fixture(scope='module')
def whole(root):
    """Run without interruption on two processes of two machines, as the reference."""
    more = dict(cwd=root, NNODES=2, MASTER_ADDR='127.0.0.1', PORT=free_port())
    nodes = [start(*TRAIN, 1, '--work-dir', 'whole', NODE_RANK=rank, **more) for rank in (1, 0)]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert sorted(losses(root / 'whole')) == list(range(1, NUM_ITERS + 1)), outs
    return root / 'whole'


@pytest.mark.parametrize('processes', [1, 2])
def test_ctrl_c_is_one_line(root, processes):
    command = [*TRAIN, processes] if processes > 1 else [sys.executable, TOOLS / 'train.py', 'config.py']
    name = f'key{processes}'
    at = 2 + 8 // processes  # in the second epoch
    process = start(*command, '--work-dir', name, cwd=root, HOLD=at)
    wait_for(process, lambda: len(losses(root / name)) == at - 1)
    running = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out[-3000:]
    assert 'Traceback' not in out
    how = 'the same command with --resume continues.'
    last = (root / name / 'last_checkpoint').read_text()
    assert last.endswith(f'{name}/epoch_1.pth')
    lines = [line for line in out.splitlines() if 'interrupted' in line]
    assert lines == [f'interrupted: the last checkpoint is {last!r}; {how}']
    assert_gone(running)


def test_sigterm_to_two_processes_saves_in_the_middle_of_an_epoch(root, whole):
    command = [*TRAIN, 2, '--work-dir', 'term']
    process = start(*command, cwd=root, HOLD=6)  # in the second of three epochs
    wait_for(process, lambda: len(losses(root / 'term')) == 5)
    running = descendants(process)
    process.terminate()  # the launcher hands it on
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out[-3000:]
    assert 'Traceback' not in out
    assert out.count('is saved in') == 1
    assert_gone(running)
    assert (root / 'term' / 'last_checkpoint').read_text().endswith('stopped.pth')

    out = run(*command, '--resume', cwd=root)
    assert out.count('SyncBatchNorm layers are trained as BatchNorm') == 1
    assert losses(root / 'term') == losses(whole)
    ours, theirs = weights(root / 'term' / 'epoch_3.pth'), weights(whole / 'epoch_3.pth')
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_two_processes_test_a_checkpoint(root, whole):
    command = ['bash', TOOLS / 'dist_test.sh', 'config.py', whole / 'epoch_3.pth', 2, '--work-dir', 'tested']
    out = run(*command, cwd=root)
    assert 'no GPU here, 2 processes on the CPU' in out and 'Epoch(test) [1/1]' in out
