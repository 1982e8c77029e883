# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The GPU kernels in Triton's interpreter, which has to be asked for before Triton is imported."""

import contextlib
import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from mmlinattn import ops

pytest.importorskip('triton')
HERE = Path(__file__).resolve().parent


CHECKS = [str(HERE / name) for name in ('triton_checks.py', 'triton_conv_checks.py')]


def run_checks(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *CHECKS, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert 'passed' in done.stdout and 'skipped' not in done.stdout


INTERPRETED = dict(TRITON_INTERPRET='1', OMP_NUM_THREADS='1')


def test_kernels():
    run_checks('-m', 'not slow', **INTERPRETED)


@pytest.mark.slow
def test_kernels_at_more_sizes():
    run_checks('-m', 'slow', **INTERPRETED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kernels_on_the_gpu():
    run_checks()


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


# --- around the kernels, in this process, which runs none -------------------------------------------------------------

launch = importlib.import_module('mmlinattn.ops.triton.attention_launch')
attention_op = importlib.import_module('mmlinattn.ops.triton.attention_op')
convolutions = importlib.import_module('mmlinattn.ops.triton.depthwise_op')


attention = importlib.import_module('mmlinattn.ops.triton.attention')
depthwise = importlib.import_module('mmlinattn.ops.triton.depthwise')


MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
PLAIN = {
    'rala': dict(kernel='relu', rotary=torch.randn(6, 2, 2), mask=MASK, weight_scale=0.7, eps=0.3),
    'rala, all tokens alike': dict(weight_scale=None, eps=0.3),
    'inline_attention': dict(scale=0.7, kernel='exp', mask=MASK),
    'linear_attention': dict(kernel='elu', mask=MASK, eps=0.3),
    'focused_attention': dict(
        inverse_scale=torch.rand(8) + 0.5, power=2.5, offset=torch.randn(1, 6, 8), mask=MASK, eps=0.3
    ),
    'focused_attention, without a floor': dict(inverse_scale=torch.rand(8) + 0.5, power=0.5, eps=0.0),
}


@pytest.mark.skipif(launch.INTERPRETED, reason='the interpreter has kernels for these')
@pytest.mark.parametrize('case', PLAIN)
def test_without_kernels_the_plain_form_gets_all_options(case):
    op, options = case.partition(',')[0], PLAIN[case]
    q, k, v = (t.requires_grad_() for t in torch.rand(3, 2, 6, 8))
    results = []
    for function in (getattr(attention, op), getattr(attention, f'{op}_reference')):
        values = v * MASK[..., None] if 'mask' in options else v
        out = function(q, k, values, 2, **options)
        assert 'mmlinattn' not in str(out.grad_fn)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(launch.INTERPRETED, reason='the interpreter has kernels for these')
def test_without_kernels_convolutions_are_pytorchs():
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4)
    plain = torch.nn.functional.conv2d(x, weight, bias, padding=1, groups=4)
    torch.testing.assert_close(depthwise.depthwise_conv2d(x, weight, bias), plain)
    torch.testing.assert_close(depthwise.residual_depthwise_conv2d(x, weight, bias), x + plain)
    for batch in (2, 0):
        each = torch.randn(batch, 4, 3, 3)
        expected = ops.depthwise.sum_of_shifts(x[:batch], each)
        torch.testing.assert_close(depthwise.dynamic_depthwise_conv2d(x[:batch], each), expected)


def test_what_kernels_serve(monkeypatch):
    def served(*dtypes, heads=2, widths=(32, 32, 32), tokens=(6, 6, 6), others=()):
        dtypes = dtypes * 3 if len(dtypes) == 1 else dtypes
        tensors = [torch.zeros(1, n, w, dtype=dtype) for n, w, dtype in zip(tokens, widths, dtypes)]
        return launch.serves(*tensors, heads, *others)

    single, half = torch.float32, torch.float16
    monkeypatch.setattr(launch, 'INTERPRETED', False)
    assert not served(single)  # a CPU
    monkeypatch.setattr(launch, 'INTERPRETED', True)
    assert served(single) and served(half) and served(torch.bfloat16) and not served(torch.float64)
    assert not served(single, single, half) and not served(half, single, half)
    assert served(single, widths=(128,) * 3) and not served(single, widths=(130, 130, 128))
    assert not served(single, widths=(128, 128, 130))  # wide values
    assert served(half, widths=(256,) * 3) and not served(half, widths=(258, 258, 256))
    assert not served(single, tokens=(0, 6, 6)) and not served(single, tokens=(6, 0, 0))
    assert served(single, others=(None, torch.zeros(3))) and not served(single, others=(torch.zeros(3, device='meta'),))
    assert not launch.serves(*(torch.zeros(1, 2, 6, 16),) * 3, 2)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('width', [16, 24, 64, 65, 128])
def test_splits_of_the_tokens(width, dtype):
    """Each holds whole blocks of rows, but for the last; no more of them than are summed at once."""
    for batch, tokens, heads in ((1, 1, 1), (2, 300, 3), (1, 1031, 1), (64, 5000, 8), (1, 66800, 1), (1, 10**6, 2)):
        plan = launch._Plan(batch, tokens, heads, 16, width, dtype)
        sizes, rows = plan.sizes, plan.rows['ROWS']
        assert (sizes['tokens'], sizes['heads'], sizes['splits']) == (tokens, heads, plan.splits)
        assert 1 <= plan.splits <= launch.MOST_SPLITS
        assert (plan.splits - 1) * sizes['span'] < tokens <= plan.splits * sizes['span'] and sizes['span'] % rows == 0
        assert plan.grid == (batch * heads * plan.splits,)
        assert plan.splits <= -(-tokens // launch.FEWEST_TOKENS)
        assert plan.both == dict(D=16, E=width, WIDTH=16, WIDTH_V={16: 16, 24: 32, 64: 64, 65: 128, 128: 128}[width])
        assert plan.widths == dict(D=16, WIDTH=16)
    assert launch._Plan(1, 66800, 1, 16, 16, dtype).splits > 100  # a large map fills a GPU
    assert launch._Plan(512, 5000, 8, 16, 16, dtype).splits == 1  # many images do without
    narrow, middle, wide = (32, 16, 16) if dtype == torch.float32 else (64, 64, 32)
    expected = {16: narrow, 24: narrow, 64: middle, 65: wide, 128: wide}[width]
    assert (rows, plan.rows['num_warps']) == (expected, 8 if width > 32 else 4)


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
    """Warps and stages are of compiled kernels; errors of compilers are told from those of the GPU."""
    monkeypatch.setattr(launch, 'INTERPRETED', interpreted)
    devices = []
    monkeypatch.setattr(torch.cuda, 'device', lambda device: devices.append(device) or contextlib.nullcontext())
    kernel, device = Kernel(), torch.device('cuda', 1)
    launch.launch(kernel, (3, 2), device, 1, 2, D=16, num_warps=4, num_stages=2)
    settings = dict(D=16) if interpreted else dict(D=16, num_warps=4, num_stages=2)
    assert kernel.calls == [((3, 2), (1, 2), settings)] and devices == ([] if interpreted else [device])
    kinds = [(torch.OutOfMemoryError('full'), torch.OutOfMemoryError, 'full')]
    told = (KeyError, 'x') if interpreted else (launch.NoKernel, "sum_keys: KeyError: 'x'")
    for error, kind, message in [*kinds, (KeyError('x'), *told)]:
        with pytest.raises(kind, match=message):
            launch.launch(Kernel(error), (1,), device)


def test_which_gradients_lie_in_one_tensor():
    x = torch.randn(2, 5, 48)
    q, k, v = x.split(16, dim=-1)
    alone = torch.randn(2, 5, 16)
    cases = [((q, k, v), 3), ((q, k, alone), 2), ((q, alone, v), 1), ((alone, k, v), 1), ((k, q, v), 1), ((q, v, k), 1)]
    cases += [((q, x.as_strided((2, 5, 16), (240, 40, 1), 16), v), 1)]  # other steps from token to token
    cases += [((x[..., :8], x[..., 16:24], v), 1), ((q, k, k), 2), ((q[:, :3], k, v), 1)]
    for tensors, together in cases:
        assert attention_op._slices_of_one(*tensors) == together
    seen = []
    torch.jit.trace(lambda *t: seen.append(attention_op._slices_of_one(*t)) or t[0] + 1, (q, k, v), check_trace=False)
    assert seen[0] == 1
    buffers = attention_op._gradient_buffers(q, k, v, 2)
    assert [tuple(b.shape) for b in buffers] == [(2, 5, 32), (2, 5, 16)]
    slices = attention_op._slices(buffers, (q, k, v), 2)
    assert [s.storage_offset() for s in slices] == [0, 16, 0] and slices[2] is buffers[1]


@pytest.mark.parametrize('fails', [False, True])
def test_convolutions_that_kernels_serve(fails, monkeypatch):
    """In the type of autocast, but where that would round what is added; what does not compile is not tried again."""
    calls = []

    def op(*arguments):
        calls.append(arguments)
        if fails:
            raise launch.NoKernel('convolve: no such register')
        return arguments[0]

    monkeypatch.setattr(convolutions, 'op', op)
    monkeypatch.setattr(convolutions, 'INTERPRETED', True)
    monkeypatch.setattr(convolutions, '_failed', set())
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(1, 4, 3, 3), torch.randn(4)
    if fails:
        with pytest.warns(UserWarning, match='plain PyTorch for depth-wise convolutions .torch.float32.: convolve: no'):
            assert convolutions.convolve(x, weight, bias) is None
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert convolutions.convolve(x, weight, bias) is None
        assert len(calls) == 1
        with pytest.warns(UserWarning, match='torch.float16'):  # another case
            assert convolutions.convolve(x.half(), weight, bias) is None
        return
    assert convolutions.convolve(x, weight, bias, True, True) is x
    assert calls.pop()[3:] == (True, True)
    assert convolutions.convolve(x, weight, None) is x
    assert calls.pop()[2:] == (None, False, False)
    for other in (x.double(), x[:0]):
        assert convolutions.convolve(other, weight, bias) is None
    assert convolutions.convolve(x, torch.randn(1, 4, 7, 7), bias) is None
    with torch.autocast('cpu', torch.bfloat16):
        assert convolutions.convolve(x, weight, bias, True) is None and not calls
        half = x.bfloat16()
        assert convolutions.convolve(half, weight, bias, True) is half
        convolutions.convolve(x, weight, bias)
    assert all({t.dtype for t in call[:3]} == {torch.bfloat16} for call in calls) and len(calls) == 2
    monkeypatch.setattr(convolutions, 'INTERPRETED', False)
    assert convolutions.convolve(x, weight, bias) is None
