# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What several processes have to agree on, with two of them over gloo."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SCRIPT = """
import sys
from pathlib import Path

import torch.distributed
from engine_toys import make_runner
from mmengine.config import Config

from mmlinattn.engine import CPUDistributedDataParallel, prepare_distributed
from mmlinattn.engine.distributed import leave_process_group

if __name__ == '__main__':
    work_dir, bad_rank = sys.argv[1:]
    cfg = Config(dict(launcher='pytorch'))
    prepare_distributed(cfg)
    rank = torch.distributed.get_rank()
    hooks = ['DataCheckHook', 'FiniteLossHook', 'CheckpointGuardHook', 'ExactResumeHook']
    runner = make_runner(
        Path(work_dir),
        [dict(type=name) for name in hooks[1:]],
        name='shared',
        launcher=cfg.launcher,
        cfg=dict(model_wrapper_cfg=cfg.model_wrapper_cfg.to_dict()),
        model=dict(bad_at=2 if rank == int(bad_rank) else None),
        loader=dict(batch_size=2),
    )
    assert isinstance(runner.model, CPUDistributedDataParallel)
    try:
        runner.train()
        message = 'trained'
    except RuntimeError as error:
        message = f'{type(error).__name__}: {error}'
    Path(work_dir, f'rank{rank}.txt').write_text(message)
    weights = [torch.zeros(4) for _ in range(2)]
    torch.distributed.all_gather(weights, runner.model.module.layer.weight.detach().flatten())
    if message == 'trained':
        assert torch.equal(*weights)
    del runner
    leave_process_group()  # as at the interpreter's end, which threads of the group must not see
    names = [path.read_text() for path in Path('/proc/self/task').glob('*/comm')]
    assert not any('gloo' in name for name in names), names
"""


def run(tmp_path, bad_rank):
    script = tmp_path / 'script.py'
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    paths = f'{TESTS}:{TESTS.parent}'
    done = subprocess.run(
        [*command, str(script), str(tmp_path / 'work'), str(bad_rank)],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES=''),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(tmp_path / 'work' / f'rank{rank}.txt').read_text() for rank in range(2)]


@pytest.mark.slow
def test_two_processes_train_the_same_weights(tmp_path):
    assert run(tmp_path, bad_rank=-1) == ['trained', 'trained']
    assert (tmp_path / 'work' / 'epoch_2.pth').exists()


@pytest.mark.slow
def test_all_stop_where_one_sees_a_bad_loss_and_say_which(tmp_path):
    first, second = run(tmp_path, bad_rank=1)
    assert first == second
    assert 'iteration 3' in first and 'process 1: loss=nan' in first and 'folder/' in first
    assert 'process 0' not in first
    assert not (tmp_path / 'work' / 'epoch_1.pth').exists()
