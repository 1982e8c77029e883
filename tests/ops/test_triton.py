# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The Triton kernels in the interpreter, which has to be asked for before Triton is imported, and compiled for GPUs
that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip('triton')
HERE = Path(__file__).resolve().parent
PLAIN = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}


def run_checks(**environment: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', str(HERE / 'triton_checks.py')],
        env={**PLAIN, **environment},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert 'passed' in done.stdout and 'skipped' not in done.stdout


@pytest.mark.slow
def test_kernels():
    run_checks(TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kernels_on_the_gpu():
    run_checks()


COMPILED = """
90,bfloat16,64,rala 90,float16,64,rala 86,float32,64,rala 86,float16,64,rala 80,bfloat16,128,rala
120,bfloat16,96,linear_attention
"""


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(tmp_path):
    """Within the 99 KB of shared memory that consumer GPUs have, most of their numbers in registers, and without
    instructions that hide NaN."""
    done = subprocess.run(
        [sys.executable, str(HERE / 'compile_kernels.py'), *COMPILED.split()],
        env={**PLAIN, 'TRITON_CACHE_DIR': str(tmp_path), 'PYTHONPATH': str(HERE.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in rows] == COMPILED.split()
    for name, registers, spilled, shared, hides_nan in rows:
        # Triton of PyTorch 2.14 spills 1308 bytes of the last one (2.11: below 1024)
        assert int(shared) <= 99 * 1024 and int(spilled) <= 1536 and hides_nan == '0', (
            name,
            registers,
            spilled,
            shared,
        )
