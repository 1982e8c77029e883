# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from types import SimpleNamespace

import pytest
from helpers.data_checks import Loop

from mmlinattn.engine import DataCheckHook, RunError

MEANT = ' If it is meant: --cfg-options custom_hooks.DataCheckHook.fault=warn'


@pytest.fixture
def look(tmp_path):
    """The line that stops a run, '' where none does, and the warnings before it."""

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
            assert str(error).endswith(MEANT)
            return str(error)[: -len(MEANT)], warnings
        return '', warnings

    return check
