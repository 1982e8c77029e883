# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The GPU kernels in Triton's interpreter, which has to be asked for before Triton is imported."""

import contextlib
import csv
import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip('triton')
HERE = Path(__file__).resolve().parent


CHECKS = ('triton_checks.py', 'triton_fit_checks.py', 'triton_conv_checks.py')


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


@pytest.mark.slow
@pytest.mark.parametrize(
    'arguments',
    [
        '--capability 90 --dtype bfloat16 --width 64 --only rala inline_attention focused_attention',
        '--capability 86 --dtype float32 --width 64 --only rala',
        '--capability 86 --dtype float16 --width 128 --only focused_attention',
        '--capability 80 --dtype bfloat16 --width 24 --only rala',
        '--capability 120 --dtype bfloat16 --width 96 --only linear_attention',
        '--capability 100 --dtype float16 --width 32 --only rala depthwise_conv2d',
    ],
)
def test_kernels_compile_without_a_gpu(arguments, tmp_path):
    """Within the 99 KB of shared memory that consumer GPUs have, and with the resources that are written down."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run(
        [sys.executable, str(HERE / 'compile_kernels.py'), *arguments.split()],
        env={**environment, 'TRITON_CACHE_DIR': str(tmp_path), 'PYTHONPATH': str(HERE.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    keys = ('capability', 'dtype', 'width', 'op', 'flags')
    with open(HERE.parent / 'data' / 'kernels.csv') as file:
        known = {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert rows
    for row in rows:
        assert int(row['shared']) <= 99 * 1024
        before = known[tuple(row[key] for key in keys)]
        if before['triton'] == row['triton']:
            assert int(row['registers']) <= int(before['registers']) and int(row['stack']) <= int(before['stack'])


# --- around the kernels, in this process, which runs none -------------------------------------------------------------

compat = importlib.import_module('mmlinattn.ops.triton.compat')
launch = importlib.import_module('mmlinattn.ops.triton.attention_launch')
attention_op = importlib.import_module('mmlinattn.ops.triton.attention_op')
convolutions = importlib.import_module('mmlinattn.ops.triton.depthwise_op')
fallback = importlib.import_module('mmlinattn.ops.triton.fallback')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('width', [16, 24, 64, 65, 128])
def test_spans_of_the_tokens(width, dtype):
    """Each holds whole blocks of rows, but for the last; no more of them than are summed at once."""
    padded = {16: 16, 24: 32, 64: 64, 65: 128, 128: 128}[width]
    for batch, tokens, heads in ((1, 1, 1), (2, 300, 3), (1, 1031, 1), (64, 5000, 8), (1, 66800, 1), (1, 10**6, 2)):
        plan = launch.plan(batch, tokens, heads, 16, width, dtype, 264)
        sizes, rows = plan.sizes, plan.rows['ROWS']
        assert (sizes['tokens'], sizes['heads'], sizes['splits']) == (tokens, heads, plan.splits)
        assert 1 <= plan.splits <= min(launch.MOST_SPLITS, -(-tokens // launch.FEWEST_TOKENS))
        assert (plan.splits - 1) * sizes['span'] < tokens <= plan.splits * sizes['span'] and sizes['span'] % rows == 0
        assert plan.grid == (batch * heads * plan.splits,)
        assert plan.both == dict(D=16, E=width, WIDTH=16, WIDTH_V=padded) and plan.widths == dict(D=16, WIDTH=16)
    assert rows == (32 if padded <= (32 if dtype == torch.float32 else 64) else 16)
    assert plan.rows['num_warps'] == (8 if padded > 32 else 4)


@pytest.mark.parametrize('at_once', [100, 264])
def test_programs_fill_whole_waves(at_once):
    """Of a GPU that runs so many at a time."""

    def plan(*sizes):
        return launch.plan(*sizes, 64, 64, torch.float16, at_once)

    assert plan(1, 66800, 1).splits >= 100  # a large map fills a GPU
    assert plan(512, 5000, 8).splits <= 2  # many images do without
    for sizes in ((8, 16384, 16), (8, 4096, 16), (1, 16384, 8), (2, 60800, 1), (2, 15200, 2)):
        programs = plan(*sizes).grid[0]
        assert programs / at_once / -(-programs // at_once) > 0.75  # of the last wave, little is idle


class Kernel:
    """Stands for a compiled one."""

    __name__ = 'sum_keys'

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def __getitem__(self, grid):
        def run(*args, **settings):
            self.calls.append((grid, args, settings))
            if self.error:
                raise self.error

        return run


@pytest.mark.parametrize('interpreted', [False, True])
def test_launches(interpreted, monkeypatch):
    """Warps and stages are of compiled kernels."""
    monkeypatch.setattr(compat, 'INTERPRETED', interpreted)
    devices = []
    monkeypatch.setattr(torch.cuda, 'device', lambda device: devices.append(device) or contextlib.nullcontext())
    kernel, device = Kernel(), torch.device('cuda', 1)
    launch.launch(kernel, (3, 2), device, 1, 2, D=16, num_warps=4, num_stages=2)
    settings = dict(D=16) if interpreted else dict(D=16, num_warps=4, num_stages=2)
    assert kernel.calls == [((3, 2), (1, 2), settings)] and devices == ([] if interpreted else [device])


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
        (triton.runtime.errors.OutOfResources(300, 200, 'shared memory'), True),
        (triton.compiler.errors.CompilationError('x = 1', None, 'no such type'), True),
        (raised_at(RuntimeError('PassManager::run failed'), 'triton.compiler.compiler', 'compile'), True),
        (raised_at(RuntimeError('Failed to find C compiler'), 'triton.runtime.build', '_build'), True),
        (raised_at(PermissionError('~/.triton'), 'triton.compiler.compiler', 'compile'), True),
        (raised_at(MemoryError(), 'triton.compiler.compiler', 'compile'), False),
        (raised_at(RuntimeError('Triton Error [CUDA]: out of memory'), 'triton.compiler.compiler', 'run'), False),
        (RuntimeError('CUDA error: operation not permitted when stream is capturing'), False),
        (torch.cuda.OutOfMemoryError('full'), False),
        (KeyError('x'), False),
    ],
    ids=str,
)
def test_only_compilers_say_that_there_is_no_kernel(error, of_compiler, monkeypatch):
    monkeypatch.setattr(compat, 'INTERPRETED', False)
    monkeypatch.setattr(torch.cuda, 'device', contextlib.nullcontext)
    with pytest.raises(launch.NoKernel if of_compiler else type(error)) as caught:
        launch.launch(Kernel(error), (1,), torch.device('cuda', 1))
    assert caught.value is error or (caught.value.__cause__ is error and 'sum_keys: ' in str(caught.value))


def test_what_failed_is_one_binary():
    """Not the op: others of its kernels may well compile."""
    tokens, rala = torch.zeros(1, 6, 8), launch.Attention(2, 'elu', weighted=True)

    def variant(op='rala', spec=rala, x=tokens, **more):
        return attention_op.variant_of(op, spec, x, x, x, **more)

    variants = [
        variant(),
        variant('linear_attention'),
        *(variant(spec=dataclasses.replace(rala, kernel='focused', power=power)) for power in (3.0, 4.0)),
        variant(spec=dataclasses.replace(rala, heads=1)),
        variant(spec=dataclasses.replace(rala, weighted=False)),
        variant(x=tokens.half()),
        variant(x=tokens.to('meta')),
        variant(mask=torch.ones(1, 6, dtype=torch.bool)),
        variant(rotary=torch.zeros(6, 2, 2)),
    ]
    assert len(set(variants)) == len(variants)
    assert variant(x=tokens[:, :3]) == variants[0]


def test_which_gradients_lie_in_one_tensor():
    x, alone = torch.randn(2, 5, 48), torch.randn(2, 5, 16)
    q, k, v = x.split(16, dim=-1)
    other_steps = x.as_strided((2, 5, 16), (240, 40, 1), 16)
    assert attention_op._slices_of_one(q, k, v) == 3
    assert attention_op._slices_of_one(q, k, alone) == attention_op._slices_of_one(q, k, k) == 2
    for tensors in ((q, alone, v), (alone, k, v), (k, q, v), (q, other_steps, v), (x[..., :8], k, v), (q[:, :3], k, v)):
        assert attention_op._slices_of_one(*tensors) == 1
    seen = []
    torch.jit.trace(lambda *t: seen.append(attention_op._slices_of_one(*t)) or t[0] + 1, (q, k, v), check_trace=False)
    assert seen[0] == 1


@pytest.fixture
def convolving(monkeypatch):
    """Kernels of convolutions give their first argument; with what they were called, and the error of the next one."""
    calls, errors = [], []

    def op(*arguments):
        calls.append(arguments)
        if errors:
            raise errors.pop()
        return arguments[0]

    monkeypatch.setattr(convolutions, 'op', op)
    monkeypatch.setattr(compat, 'INTERPRETED', True)
    monkeypatch.setattr(fallback, 'failed', set())
    return calls, errors


CONVOLUTION = torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4)


def test_a_convolution_that_does_not_compile_is_not_tried_again(convolving):
    calls, errors = convolving
    errors += [launch.NoKernel('convolve: no such register')]
    with pytest.warns(UserWarning, match='PyTorch for depth-wise convolutions .torch.float32, 3x3.: convolve: no'):
        assert convolutions.convolve(*CONVOLUTION) is None
    assert convolutions.convolve(*CONVOLUTION) is None and len(calls) == 1
    assert convolutions.convolve(*(t.half() for t in CONVOLUTION)) is not None  # another case


def test_convolutions_in_the_type_of_autocast(convolving, monkeypatch):
    """But where that would round what is added."""
    (x, weight, bias), (calls, _) = CONVOLUTION, convolving
    assert convolutions.convolve(x, weight, bias, True, True) is x and calls.pop()[3:] == (True, True)
    assert convolutions.convolve(x, weight, None) is x and calls.pop()[2:] == (None, False, False)
    with torch.autocast('cpu', torch.bfloat16):
        assert convolutions.convolve(x, weight, bias, True) is None and not calls
        assert convolutions.convolve(x.bfloat16(), weight, bias, True).dtype == torch.bfloat16
        convolutions.convolve(x, weight, bias)
    assert [{t.dtype for t in call[:3]} for call in calls] == [{torch.bfloat16}] * 2
    monkeypatch.setattr(compat, 'INTERPRETED', False)
    assert convolutions.convolve(x, weight, bias) is None
