# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The GPU kernels in Triton's interpreter, which has to be asked for before Triton is imported."""

# ruff: noqa: E402
import csv
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip('triton')
from mmlinattn.ops.triton import attention_launch as launch
from mmlinattn.ops.triton import attention_op, canary, compat
from mmlinattn.ops.triton import depthwise_op as convolutions

HERE = Path(__file__).resolve().parent

CHECKS = ('triton_checks.py', 'triton_conv_checks.py')


def run_checks(check: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', str(HERE / check), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert 'passed' in done.stdout and 'skipped' not in done.stdout


@pytest.mark.parametrize(
    ('check', 'marks'),
    [
        *((check, 'not slow') for check in CHECKS),
        *(pytest.param(check, 'slow', marks=pytest.mark.slow) for check in CHECKS),
        pytest.param('canary_checks.py', '', marks=pytest.mark.slow),
    ],
)
def test_kernels(check, marks):
    run_checks(check, '-m', marks, TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('check', [*CHECKS, 'canary_checks.py'])
def test_kernels_on_the_gpu(check):
    run_checks(check)


COMPILED = """
90,bfloat16,64,rala,all 90,bfloat16,64,inline_attention,all 90,bfloat16,64,focused_attention,all 86,float32,64,rala,all
86,float16,128,focused_attention,all 80,bfloat16,24,rala,all 120,bfloat16,96,linear_attention,all
100,float16,32,rala,all 100,float16,3,depthwise_conv2d,all 100,float16,5,depthwise_conv2d,all
"""


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(tmp_path):
    """Within the 99 KB of shared memory that consumer GPUs have, and with the resources that are written down."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run(
        [sys.executable, str(HERE / 'compile_kernels.py'), *COMPILED.split()],
        env={**environment, 'TRITON_CACHE_DIR': str(tmp_path), 'PYTHONPATH': str(HERE.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    keys = ('capability', 'dtype', 'width', 'op', 'flags')
    with open(HERE.parent / 'data' / 'kernels.csv') as file:
        known = {','.join(row[key] for key in keys): row for row in csv.DictReader(file)}
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert len(rows) == len(COMPILED.split())
    for name, row in zip(COMPILED.split(), rows):
        assert int(row['shared']) <= 99 * 1024, name
        before = known[name]
        if before['triton'] == row['triton']:
            assert int(row['registers']) <= int(before['registers']) and int(row['stack']) <= int(before['stack']), name


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


def test_what_failed_is_one_binary():
    """Not the op: others of its kernels may well compile."""
    tokens, rala = torch.zeros(1, 6, 8), launch.Attention(2, 'focused', weighted=True)

    def variant(op='rala', x=tokens, mask=None, rotary=None, **changes):
        return attention_op.variant_of(op, dataclasses.replace(rala, **changes), x, x, x, mask=mask, rotary=rotary)

    others = dict(op='focused_attention'), dict(power=4.0), dict(heads=1), dict(weighted=False), dict(kernel='elu')
    tensors = dict(x=tokens.half()), dict(x=tokens.to('meta')), dict(mask=tokens[..., 0] > 0), dict(rotary=tokens)
    variants = {variant(), *(variant(**options) for options in others + tensors)}
    assert len(variants) == 1 + len(others + tensors)
    assert variant(x=tokens[:, :3]) in variants


@pytest.fixture
def op(monkeypatch):
    """In place of the kernels of convolutions: gives its first argument."""
    op = mock.Mock(side_effect=lambda x, *_: x)
    monkeypatch.setattr(convolutions, 'op', op)
    monkeypatch.setattr(compat, 'INTERPRETED', True)
    monkeypatch.setattr(canary, '_verdicts', {})
    return op


CONVOLUTION = torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4)


def test_a_convolution_that_does_not_compile_is_not_tried_again(op):
    op.side_effect = launch.NoKernel('convolve: no such register')
    with pytest.warns(UserWarning, match='depth-wise convolutions .torch.float32, 3x3.*forward: convolve: no'):
        assert convolutions.convolve(*CONVOLUTION) is None
    op.side_effect = None
    assert convolutions.convolve(*CONVOLUTION) is None and op.call_count == 1
    assert convolutions.convolve(*(t.half() for t in CONVOLUTION)) is not None  # another case


def test_convolutions_in_the_type_of_autocast(op, monkeypatch):
    """But where that would round what is added."""
    x, weight, bias = CONVOLUTION
    assert convolutions.convolve(x, weight, bias, True, True) is x and op.call_args.args[3:] == (True, True)
    assert convolutions.convolve(x, weight, None) is x and op.call_args.args[2:] == (None, False, False)
    op.reset_mock()
    with torch.autocast('cpu', torch.bfloat16):
        assert convolutions.convolve(x, weight, bias, True) is None and not op.called
        assert convolutions.convolve(x.bfloat16(), weight, bias, True).dtype == torch.bfloat16
        convolutions.convolve(x, weight, bias)
    assert [{t.dtype for t in call.args[:3]} for call in op.call_args_list] == [{torch.bfloat16}] * 2
    monkeypatch.setattr(compat, 'INTERPRETED', False)
    assert convolutions.convolve(x, weight, bias) is None
