# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
import torch
from helpers.data_checks import Loop

from mmlinattn.engine import DataCheckHook, RunError
from mmlinattn.engine.runner import leave_process_group

REMEDY = ' If it is meant: --cfg-options custom_hooks.DataCheckHook.fault=warn'


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    leave_process_group(failed=False)
    assert not torch.distributed.is_initialized()


@pytest.fixture
def look(tmp_path):
    """Run ``DataCheckHook``; return its error without the remedy, '' if there is none, and its warnings."""

    def check(model, train=None, val=None, test=None, checkpoint=None, resumes=False, cfg=(), **hook):
        loops = {name: data and Loop(*data) for name, data in dict(train=train, val=val, test=test).items()}
        warnings = []
        runner = SimpleNamespace(
            work_dir=str(tmp_path),
            model=model,
            cfg=dict(cfg),
            visualizer=SimpleNamespace(),
            logger=SimpleNamespace(warning=warnings.append),
            _resume=resumes,
            **{f'_{name}_loop': loop for name, loop in loops.items()},
        )
        made = DataCheckHook(**hook)
        try:
            made.before_run(runner)
            if checkpoint:
                made.after_load_checkpoint(runner, checkpoint)
        except RunError as error:
            assert str(error).endswith(REMEDY)
            return str(error)[: -len(REMEDY)], warnings
        return '', warnings

    return check
