# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""How the GPU kernels fit into PyTorch; run as ``triton_checks.py`` is."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from triton_checks import (
    DEVICE,
    OPS,
    adversary,  # noqa: F401
    distance,
    every_op,
    inputs,
    kernels,
    launch,
    normal,
    rala_reference,
    run,
    table,
)

from mmlinattn.ops.triton import fallback

# the interpreter is slow: between them, two ops pass through every line of the kernels
some_ops = pytest.mark.parametrize(
    'name', ['rala', 'focused_attention', *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPS)[1:3])]
)


@some_ops
def test_kernels_may_run_twice(name, monkeypatch):
    """None adds to what another run has left, or depends on the order of the programs: results are equal bit by bit."""
    once, results = launch.launch, []
    leaves, options = inputs(name, batch=2, tokens=300, mask=True)
    for times in (1, 2):
        monkeypatch.setattr(
            launch, 'launch', lambda *args, times=times, **more: [once(*args, **more) for _ in range(times)]
        )
        out = run(OPS[name][0], leaves, options)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_gradients_of_slices_lie_as_the_slices_do():
    x = normal(2, 20, 3 * 32).requires_grad_()
    q, k, v = x.chunk(3, dim=-1)
    out = kernels.inline_attention(q, k, v, 2, 0.3)
    grads = torch.autograd.grad(out.sum(), (q, k, v))  # of a sum: one number, seen at every place
    plain = OPS['inline_attention'][1](q, k, v, 2, 0.3)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sum(), (q, k, v)), rtol=1e-4, atol=1e-4)
    starts = [grad.storage_offset() for grad in grads]
    assert starts == [0, 32, 64] and len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    out = kernels.inline_attention(q, k, v.contiguous(), 2, 0.3)
    grads = torch.autograd.grad(out.sum(), (q, k))
    assert [grad.stride() for grad in grads] == [(20 * 64, 64, 1)] * 2


@pytest.mark.parametrize('name', ['rala', *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPS)[1:])])
def test_registration(name):
    run_op = getattr(kernels, f'_run_{name}')
    q, k, v = (normal(2, 5, 16).requires_grad_() for _ in range(3))
    mask = torch.tensor([[True] * 4 + [False]] * 2, device=DEVICE)
    focused = name == 'focused_attention'
    rotary = table(5, 16) if name == 'rala' else None
    extra = (normal(1, 5, 16).expand(2, 5, 16), torch.rand(16, device=DEVICE) + 0.5) if focused else (None, None)
    options = (1, 'focused' if focused else 'elu', name == 'inline_attention', name == 'rala', 0.3, 1e-6, 3.0)
    torch.library.opcheck(run_op.op, (q, k, v, rotary, mask, *extra, *options))
    with torch.no_grad():
        saved = run_op.op(q, k, v, rotary, mask, *extra, *options)
    grad = normal(2, 5, 16)
    tensors = [t.detach() for t in (q, k, v)]
    for together in (1, 2, 3):
        args = (grad, *tensors, rotary, mask, *extra, *saved[1:], *options, together)
        torch.library.opcheck(run_op.op_backward, args, test_utils=('test_schema', 'test_faketensor'))


@every_op
def test_second_derivatives(name):
    leaves, options = inputs(name, batch=1, tokens=9, heads=1)
    results = []
    for op in OPS[name][:2]:
        (grad,) = torch.autograd.grad(run(op, leaves, options).square().sum(), leaves[:1], create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), leaves[0])[0])
    assert distance(*results) < 1e-4


def test_checkpoint_autocast_and_frozen_inputs():
    leaves, options = inputs('rala', batch=1, tokens=9, heads=1)
    expected = torch.autograd.grad(run(kernels.rala, leaves, options).sum(), leaves)[0]
    out = checkpoint(lambda x: run(kernels.rala, [x], options), leaves[0], use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.sum(), leaves)[0], expected)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = run(kernels.rala, leaves, options)
    assert out.dtype == torch.float32
    assert torch.equal(torch.autograd.grad(out.sum(), leaves)[0], expected)
    q, k, v = leaves[0].detach().chunk(3, dim=-1)
    v = v.clone().requires_grad_()
    out = kernels.rala(q, k, v, **options)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), v)[0], expected[..., 32:])


def test_compiled_whole():
    torch._dynamo.reset()
    x = normal(1, 9, 48).requires_grad_()

    def attend(x):
        q, k, v = x.chunk(3, dim=-1)
        return kernels._run_rala(launch.Attention(1, 'elu', weighted=True), q, k, v)

    compiled = torch.compile(attend, fullgraph=True, backend='aot_eager')
    out, expected = compiled(x), attend(x)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_a_kernel_that_does_not_compile_warns_once(where, monkeypatch):
    x = normal(1, 9, 48).requires_grad_()

    def grad(op):
        q, k, v = x.chunk(3, dim=-1)
        return torch.autograd.grad(op(q, k, v, 1).square().sum(), x)[0]

    def fails(*args, **kwargs):
        raise launch.NoKernel('sum_keys: PTXASError: no such register')

    monkeypatch.setattr(fallback, 'failed', set())
    monkeypatch.setattr(launch, where, fails)
    with pytest.warns(UserWarning, match='plain PyTorch for rala .elu, .*float32, heads of 16 channels.: .*PTXASError'):
        first = grad(kernels.rala)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        second = grad(kernels.rala)
    expected = grad(rala_reference)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
