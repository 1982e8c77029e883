# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What ``import mmlinattn`` costs and leaves alone."""

import subprocess
import sys

import pytest
from config_helpers import ROOT


def test_importing_the_package_warns_of_nothing_and_leaves_upstream_alone():
    code = "import sys, mmlinattn; print([m for m in ('mmdet', 'mmseg', 'mmpretrain', 'pandas') if m in sys.modules])"
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == '[]'


@pytest.mark.slow
def test_importing_the_package_costs_little():
    """Beyond MMEngine and MMCV, of which a run needs these parts in any case."""
    code = (
        'import time, mmengine.runner, mmengine.model, mmengine.hooks, mmengine.optim, mmcv.cnn, mmcv.transforms\n'
        'begin = time.process_time(); import mmlinattn; print(time.process_time() - begin)'
    )
    runs = [subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.3
