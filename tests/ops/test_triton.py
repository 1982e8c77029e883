# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The GPU kernels in Triton's interpreter, which has to be asked for before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip('triton')
HERE = Path(__file__).resolve().parent


def run_checks(checks: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', str(HERE / checks), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert 'passed' in done.stdout and 'skipped' not in done.stdout


INTERPRETED = dict(TRITON_INTERPRET='1', OMP_NUM_THREADS='1')
every_file = pytest.mark.parametrize('checks', ['triton_checks.py', 'triton_conv_checks.py'])


@every_file
def test_kernels(checks):
    run_checks(checks, '-m', 'not slow', **INTERPRETED)


@pytest.mark.slow
@every_file
def test_kernels_at_more_sizes(checks):
    run_checks(checks, '-m', 'slow', **INTERPRETED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@every_file
def test_kernels_on_the_gpu(checks):
    run_checks(checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    'arguments',
    [
        '--capability 90 --dtype bfloat16 --head-dim 64 --only rala inline focused',
        '--capability 86 --dtype float32 --head-dim 64 --only rala',
        '--capability 86 --dtype float16 --head-dim 128 --only focused',
        '--capability 80 --dtype bfloat16 --head-dim 24 --only rala',
    ],
)
def test_kernels_compile_without_a_gpu(arguments, tmp_path):
    """Within the 99 KB of shared memory that consumer GPUs have, the smallest of compute capability 8.0 and later."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run(
        [sys.executable, str(HERE / 'compile_kernels.py'), *arguments.split()],
        env={**environment, 'TRITON_CACHE_DIR': str(tmp_path), 'PYTHONPATH': str(HERE.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) >= 8
    assert all(int(shared) <= 99 * 1024 for _, shared, *_ in kernels)
