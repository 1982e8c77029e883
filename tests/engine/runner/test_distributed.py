# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Two processes over gloo."""

import os
import sys

import pytest
import torch
from helpers import tool_runs
from mmengine.config import Config
from torch import nn

from mmlinattn.engine import CPUDistributedDataParallel, RunError, prepare_distributed
from mmlinattn.engine.runner import launched_rank, leave_process_group

SCRIPT = """
import sys
from pathlib import Path

import torch.distributed
from helpers.engine_toys import make_runner
from mmengine.config import Config

from mmlinattn.engine import CPUDistributedDataParallel, prepare_distributed
from mmlinattn.engine.runner.distributed import leave_process_group

if __name__ == '__main__':
    work_dir, bad_at = sys.argv[1:]
    cfg = Config(dict(launcher='pytorch'))
    prepare_distributed(cfg)
    rank = torch.distributed.get_rank()
    hooks = ['FiniteLossHook', 'ExactResumeHook', 'UnusedParametersHook']
    runner = make_runner(
        Path(work_dir),
        [dict(type=name) for name in hooks],
        launcher=cfg.launcher,
        cfg=dict(model_wrapper_cfg=cfg.model_wrapper_cfg.to_dict()),
        model=dict(bad_at=int(bad_at) if rank == 1 else None),
        loader=dict(batch_size=2),
    )
    assert isinstance(runner.model, CPUDistributedDataParallel)
    try:
        runner.train()
        message = 'trained'
    except RuntimeError as error:
        message = f'{type(error).__name__}: {error}'
    Path(work_dir, f'rank{rank}.txt').write_text(message)
    own = torch.cat([p.detach().flatten() for p in runner.model.parameters()])
    weights = [torch.zeros_like(own) for _ in range(2)]
    torch.distributed.all_gather(weights, own)
    if message == 'trained':
        assert torch.equal(*weights)
    del runner
    sys.setswitchinterval(60)  # as on a busy machine, this thread keeps the GIL that gloo's waits for
    torch.distributed.all_gather(weights, own, async_op=True)
    sum(range(3 * 10**7))
    leave_process_group(failed=False)  # as at the end of the interpreter: threads of the group would abort it
    names = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]
    assert not any('gloo' in name for name in names), names
"""


def run(tmp_path, bad_at=99):
    """Train in two processes, the second with a bad loss after some steps; return the end of each."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    tool_runs.run(*command, 'script.py', 'work', bad_at, cwd=tmp_path)
    return [(tmp_path / 'work' / f'rank{rank}.txt').read_text() for rank in range(2)]


LAUNCHERS = dict(
    pytorch=('RANK', 'WORLD_SIZE', 'LOCAL_RANK'),
    slurm=('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID'),
    mpi=('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
)
OURS = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT', 'MASTER_ADDR')


@pytest.fixture
def joined(monkeypatch):
    """Record the backends of process groups, without an accelerator or launcher."""
    calls = []
    for name in {*OURS, *sum(LAUNCHERS.values(), ())}:
        monkeypatch.setenv(name, '')  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr('mmlinattn.engine.runner.distributed.get_device', lambda: 'cpu')
    monkeypatch.setattr('torch.distributed.init_process_group', lambda kind, timeout: calls.append(kind))
    monkeypatch.setattr('torch.distributed.is_initialized', lambda: bool(calls))
    return calls


@pytest.mark.parametrize('launcher', LAUNCHERS)
def test_processes_of_every_launcher_are_joined(joined, monkeypatch, tmp_path, launcher):
    for name in LAUNCHERS['pytorch']:
        monkeypatch.setenv(name, '9')  # left over from another launcher
    for name, value in zip(LAUNCHERS[launcher], '352'):
        monkeypatch.setenv(name, value)
    if launcher == 'slurm':
        asked = '[ "$*" = "show hostnames node[7-8]" ]'
        (tmp_path / 'scontrol').write_text(f'#!/bin/sh\n{asked} && echo node7 && echo node8\n')
        (tmp_path / 'scontrol').chmod(0o755)
        monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
        monkeypatch.setenv('SLURM_NODELIST', 'node[7-8]')
    assert launched_rank(launcher) == 3
    cfg = Config(dict(launcher=launcher))
    prepare_distributed(cfg)
    first = 'node7' if launcher == 'slurm' else '127.0.0.1'
    assert [os.environ.get(name) for name in OURS] == ['3', '5', '2', '29500', first]
    assert joined == ['gloo']
    assert cfg.model_wrapper_cfg == dict(
        type='CPUDistributedDataParallel', broadcast_buffers=False, find_unused_parameters=False
    )
    prepare_distributed(cfg)
    assert joined == ['gloo']


def test_variables_that_a_launcher_sets(joined, monkeypatch):
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '2')
    assert launched_rank('mpi') == launched_rank('none') == 0
    missing = 'OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK'
    with pytest.raises(RunError, match=f'--launcher mpi: {missing} not set in the environment. Start through tools/'):
        prepare_distributed(Config(dict(launcher='mpi')))
    assert joined == []


def test_each_process_takes_its_gpu(joined, monkeypatch):
    """MMEngine selects the GPU later, after our check of operators."""
    chosen = []
    monkeypatch.setattr('mmlinattn.engine.runner.distributed.get_device', lambda: 'cuda')
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.device_count', lambda: 2)
    monkeypatch.setattr('torch.cuda.set_device', chosen.append)
    cfg = Config(dict(launcher='slurm'))
    for rank in '01':
        monkeypatch.setenv('SLURM_LOCALID', rank)
        prepare_distributed(cfg)
    assert joined == [] and 'model_wrapper_cfg' not in cfg and chosen == [0, 1]
    monkeypatch.setenv('SLURM_LOCALID', '2')
    with pytest.raises(RunError, match='process 3 of this machine has no GPU: there are 2. Start at most that many'):
        prepare_distributed(cfg)


OTHERS = dict(type='CPUDistributedDataParallel', broadcast_buffers=True, find_unused_parameters=True, static_graph=True)


@pytest.mark.parametrize('kind', ['MMDistributedDataParallel', 'mmengine.MMDistributedDataParallel', OTHERS['type']])
def test_settings_of_the_user_stay(joined, monkeypatch, kind):
    for name, value in zip(OURS, ('0', '2', '0', '1234', 'elsewhere')):
        monkeypatch.setenv(name, value)
    wrapper = dict(type=kind, broadcast_buffers=True, static_graph=True)
    # the wrapper's setting overrides that of the config
    for search in (
        dict(find_unused_parameters=True, model_wrapper_cfg=wrapper),
        dict(model_wrapper_cfg=dict(wrapper, find_unused_parameters=True)),
    ):
        cfg = Config(dict(launcher='pytorch', **search))
        prepare_distributed(cfg)
        assert cfg.model_wrapper_cfg == OTHERS
    assert os.environ['MASTER_PORT'] == '1234' and os.environ['MASTER_ADDR'] == 'elsewhere'


def test_a_wrapper_that_needs_an_accelerator(joined):
    cfg = Config(dict(launcher='pytorch', model_wrapper_cfg=dict(type='MMFullyShardedDataParallel')))
    with pytest.raises(RunError, match="model_wrapper_cfg.type = 'MMFullyShardedDataParallel' needs an accelerator"):
        prepare_distributed(cfg)
    assert joined == []


def test_an_error_of_the_run_is_not_hidden_by_one_of_its_end(monkeypatch):
    calls = []
    monkeypatch.setattr('torch.distributed.is_initialized', lambda: True)
    monkeypatch.setattr(
        'torch.distributed.distributed_c10d._abort_process_group', lambda: calls.append(1) or 1 / 0, raising=False
    )
    leave_process_group(failed=True)
    assert calls == [1]


def test_sync_batch_norm_becomes_batch_norm_on_the_cpu(one_process):
    """PyTorch trains SyncBatchNorm on GPUs only."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    wrapped = CPUDistributedDataParallel(model, device_ids=[0])
    assert type(wrapped.module[1]).__mro__[1] is nn.modules.batchnorm._BatchNorm
    wrapped.train()(torch.randn(2, 3, 4, 4)).sum().backward()
    assert wrapped.module[0].weight.grad is not None
    plain = nn.Sequential(nn.Linear(2, 2))
    assert CPUDistributedDataParallel(plain).module is plain


@pytest.mark.slow
def test_two_processes_train_the_same_weights(tmp_path):
    assert run(tmp_path) == ['trained', 'trained']
    assert (tmp_path / 'work' / 'epoch_2.pth').exists()


@pytest.mark.slow
def test_all_processes_stop_at_a_bad_loss(tmp_path):
    """The other process stops at weights that are not finite any more, or is ended by the launcher."""
    first, second = run(tmp_path, bad_at=2)
    assert 'iteration 3' in second and 'process 1: loss=nan' in second and 'folder/' in second
    assert first.startswith('RunError') and 'not finite' in first and 'process 0' not in first
    assert not (tmp_path / 'work' / 'epoch_1.pth').exists()
