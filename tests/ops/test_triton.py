# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The GPU kernels in Triton's interpreter, which has to be asked for before Triton is imported."""

# ruff: noqa: E402
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip('triton')
from mmlinattn.ops.triton import attention_launch as launch
from mmlinattn.ops.triton import compat

HERE = Path(__file__).resolve().parent


def run_checks(check: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', str(HERE / check)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert 'passed' in done.stdout and 'skipped' not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('check', ['triton_checks.py', 'canary_checks.py'])
def test_kernels(check):
    run_checks(check, TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('check', ['triton_checks.py', 'canary_checks.py'])
def test_kernels_on_the_gpu(check):
    run_checks(check)


COMPILED = """
90,bfloat16,64,rala 90,bfloat16,64,inline_attention 86,float32,64,rala
86,float16,128,focused_attention 120,bfloat16,96,linear_attention
"""


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(tmp_path):
    """Within the 99 KB of shared memory that consumer GPUs have."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run(
        [sys.executable, str(HERE / 'compile_kernels.py'), *COMPILED.split()],
        env={**environment, 'TRITON_CACHE_DIR': str(tmp_path), 'PYTHONPATH': str(HERE.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in rows] == COMPILED.split()
    assert max(int(shared) for _, shared in rows) <= 99 * 1024


# --- around the kernels, in this process, which runs none -------------------------------------------------------------


@pytest.mark.parametrize('at_once', [100, 264])
def test_spans_of_the_tokens(at_once):
    """No more than are summed at once. Programs fill whole waves of a GPU that runs so many at a time; many images do
    without spans."""
    for batch, tokens, heads in ((8, 16384, 16), (8, 4096, 16), (1, 16384, 8), (2, 60800, 1), (2, 15200, 2)):
        plan = launch.plan(batch, tokens, heads, 64, 64, torch.float16, at_once)
        assert plan.splits <= launch.MOST_SPLITS and plan.grid == (batch * heads * plan.splits,)
        assert plan.grid[0] / at_once / -(-plan.grid[0] // at_once) > 0.75
    assert launch.plan(512, 5000, 8, 64, 64, torch.float16, at_once).splits <= 2


def raised_at(error: Exception, module: str, function: str) -> Exception:
    """``error`` as it comes from a function of a module."""
    namespace = dict(__name__=module, error=error)
    exec(f'def {function}():\n    raise error', namespace)
    try:
        namespace[function]()
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ('error', 'of_compiler'),
    [
        (triton.compiler.errors.CompilationError('x = 1', None, 'no such type'), True),
        (raised_at(RuntimeError('PassManager::run failed'), 'triton.compiler.compiler', 'compile'), True),
        (raised_at(RuntimeError('Failed to find C compiler'), 'triton.runtime.build', '_build'), True),
        (raised_at(MemoryError(), 'triton.compiler.compiler', 'compile'), False),
        (raised_at(RuntimeError('Triton Error [CUDA]: out of memory'), 'triton.compiler.compiler', 'run'), False),
        (RuntimeError('CUDA error: operation not permitted when stream is capturing'), False),
    ],
    ids=str,
)
def test_only_compilers_say_that_there_is_no_kernel(error, of_compiler, monkeypatch):
    monkeypatch.setattr(compat, 'INTERPRETED', False)
    monkeypatch.setattr(torch.cuda, 'device', mock.MagicMock())
    kernel, device = mock.MagicMock(__name__='sum_keys'), torch.device('cuda', 1)
    kernel[1,].side_effect = error
    with pytest.raises(launch.NoKernel if of_compiler else type(error)) as caught:
        launch.launch(kernel, (1,), device, 5, num_warps=4)
    assert caught.value is error or (caught.value.__cause__ is error and 'sum_keys: ' in str(caught.value))
    kernel[1,].assert_called_once_with(5, num_warps=4)
    torch.cuda.device.assert_called_once_with(device)
