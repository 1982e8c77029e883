# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What holds for the GPU kernels: on a GPU compiled (``pytest tests/ops/triton_checks.py``), without one in Triton's
interpreter, for which ``test_triton.py`` starts a process with ``TRITON_INTERPRET=1``."""

# ruff: noqa: E402
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

pytest.importorskip('triton')
from mmlinattn.ops.triton.compat import INTERPRETED

if INTERPRETED:
    DEVICE = 'cpu'
    import interpreter
elif torch.cuda.is_available():
    DEVICE = 'cuda'
else:
    pytest.skip('needs a GPU or TRITON_INTERPRET=1', allow_module_level=True)

from mmlinattn.ops.focused import focused_attention_reference
from mmlinattn.ops.inline import inline_attention_reference
from mmlinattn.ops.plain_linear import linear_attention_reference
from mmlinattn.ops.rank_augmented import rala_reference
from mmlinattn.ops.triton import attention as kernels
from mmlinattn.ops.triton import attention_launch as launch

OPS = {
    'rala': (kernels.rala, rala_reference, dict(weight_scale=0.3)),
    'inline_attention': (kernels.inline_attention, inline_attention_reference, dict(scale=0.3)),
    'linear_attention': (kernels.linear_attention, linear_attention_reference, dict(kernel='elu')),
    'focused_attention': (kernels.focused_attention, focused_attention_reference, dict(power=3)),
}
# relative to the norm; the interpreter cuts bfloat16 off where a GPU rounds
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.5e-2}
every_op = pytest.mark.parametrize('name', list(OPS))


@pytest.fixture(autouse=True)
def adversary(monkeypatch, request):
    """New memory holds NaN, and programs run in a random order."""
    empty = launch.empty
    monkeypatch.setattr(launch, 'empty', lambda *shape, **options: empty(*shape, **options).fill_(float('nan')))
    if not INTERPRETED:
        yield
        return
    with interpreter.shuffled(len(request.node.name)):
        yield


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def table(tokens, d):
    angle = torch.rand(tokens, d // 2, device=DEVICE) * 6
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def inputs(name, batch=1, tokens=37, keys=None, heads=1, d=16, e=None, dtype=torch.float32, mask=False, **options):
    """Leaves and arguments of an op; slices of one projection where all have one size."""
    keys, e = keys or tokens, e or d
    if keys == tokens and e == d:
        leaves = [normal(batch, tokens, 3 * heads * d, dtype=dtype)]
    else:
        leaves = [normal(batch, n, heads * w, dtype=dtype) for n, w in ((tokens, d), (keys, d), (keys, e))]
    options = {**OPS[name][2], **options}
    if mask:
        mask = torch.rand(batch, keys, device=DEVICE) > 0.3
        mask[0, 0], mask[-1] = True, batch == 1  # the last of several images is all padding
        options['mask'] = mask
    if name == 'focused_attention':
        leaves.append(torch.rand(heads * d, device=DEVICE) + 0.5)
        if options.pop('offset', False):
            leaves.append(normal(1, keys, heads * d) * 0.3)
    if options.pop('rotary', False):
        options['rotary'] = table(tokens, d)
    return [leaf.requires_grad_() for leaf in leaves], dict(num_heads=heads, **options)


def run(op, leaves, options):
    options = dict(options)
    tokens, more = (leaves[:1], leaves[1:]) if leaves[1:2] == [] or leaves[1].dim() == 1 else (leaves[:3], leaves[3:])
    q, k, v = tokens[0].chunk(3, dim=-1) if len(tokens) == 1 else tokens
    options.update(zip(('inverse_scale', 'offset'), more))
    if 'rotary' in options:
        options['rotary'] = options['rotary'].to(torch.promote_types(q.dtype, torch.float32))
    if 'mask' in options:
        v = v * options['mask'].unsqueeze(-1).to(v.dtype)
    return op(q, k, v, **options)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_follows(ours, theirs, leaves):
    """Values and gradients of ``ours``, a kernel's, beside those of ``theirs`` in float64."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, expected = ours(*leaves), theirs(*wide)
    assert out.shape == expected.shape and out.dtype == leaves[0].dtype and 'mmlinattn' in str(out.grad_fn)
    assert out.is_contiguous()
    probe = normal(*out.shape, dtype=out.dtype)
    grads = torch.autograd.grad(out, leaves, probe)
    expected_grads = torch.autograd.grad(expected, wide, probe.double())
    tolerance = TOLERANCE[out.dtype]
    assert distance(out, expected) < tolerance
    for leaf, grad, expected_grad in zip(leaves, grads, expected_grads):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype
        # some vanish but for eps: those of queries, of one token
        error = (grad.double() - expected_grad).norm()
        assert error < tolerance * (expected_grad.norm() + 0.3 * grad.numel() ** 0.5)


def assert_follows_reference(name, fewest=256, **options):
    """``fewest``: tokens of a split."""
    kernels, reference, _ = OPS[name]
    leaves, options = inputs(name, **options)
    with mock.patch.object(launch, 'FEWEST_TOKENS', fewest):
        assert_follows(lambda *t: run(kernels, list(t), options), lambda *t: run(reference, list(t), options), leaves)


# --- values and gradients ---------------------------------------------------------------------------------------------

OWN = dict(rala=dict(rotary=True), focused_attention=dict(offset=True))
SIZES = [
    dict(heads=2),  # slices of a projection
    dict(batch=2, d=12, mask=True),
    dict(tokens=300),  # several splits
    dict(batch=2, tokens=1),
]
CASES = [
    *(dict(name=name, **OWN.get(name, {}), **sizes) for name in OPS for sizes in SIZES),
    *(dict(name=name, tokens=20, keys=67, e=40, mask=True) for name in list(OPS)[1:]),
    *(
        dict(name=name, tokens=70, dtype=dtype, **OWN[name])
        for name in OWN
        for dtype in (torch.float16, torch.bfloat16)
    ),
    dict(name='inline_attention', kernel='exp'),
    dict(name='inline_attention', kernel='leakyrelu'),
    dict(name='linear_attention', kernel='softmax', d=20),
    dict(name='linear_attention', kernel='identity', eps=100.0),
    dict(name='rala', kernel='relu'),
    dict(name='rala', weight_scale=None, rotary=True, mask=True),
    dict(name='focused_attention', power=4.5),
    dict(name='rala', tokens=600, mask=True, fewest=16),  # more splits than are added up at once, as of detectors' maps
]


@pytest.mark.parametrize('case', CASES, ids=lambda case: ' '.join(f'{key}={value}' for key, value in case.items()))
def test_values_and_gradients(case):
    assert_follows_reference(**case)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@example('linear_attention', (1, 600, 600, 1), (16, 16), torch.float32, True, 16)
@example('rala', (1, 71, 71, 1), (96, 96), torch.float16, True, 256)
@example('inline_attention', (1, 71, 71, 1), (128, 128), torch.bfloat16, True, 256)
@example('focused_attention', (24, 9, 9, 1), (48, 48), torch.bfloat16, False, 256)
@given(
    name=st.sampled_from(list(OPS)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(1, 60), st.integers(1, 3)),
    widths=st.tuples(*[st.integers(1, 33) | st.sampled_from([48, 64, 128])] * 2),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    mask=st.booleans(),
    fewest=st.sampled_from([16, 256]),
)
def test_odd_shapes(name, sizes, widths, dtype, mask, fewest):
    (batch, tokens, keys, heads), (d, e) = sizes, widths
    shape = dict(batch=batch, tokens=tokens, keys=tokens if name == 'rala' else keys, heads=heads, d=d, e=e)
    dtype = torch.float16 if max(widths) > 64 and dtype == torch.float32 else dtype  # for which there is no kernel
    assert_follows_reference(name, **shape, dtype=dtype, mask=mask, fewest=fewest)


@pytest.mark.parametrize('dead', ['queries', 'keys'])
def test_dead_tokens_in_float16(dead):
    """Queries of zeros, or that meet no key, are divided by eps alone: finite gradients at a large loss scale."""
    leaves, options = inputs('linear_attention', dtype=torch.float16, kernel='relu')
    with torch.no_grad():
        if dead == 'queries':
            leaves[0][:, ::3, :16] = -1
        else:
            leaves[0][..., :16], leaves[0][..., 16:32] = 10, -1
    out = run(kernels.linear_attention, leaves, options)
    grad = torch.autograd.grad(out, leaves, torch.full_like(out, 1000.0))[0]
    if dead == 'queries':
        assert out.isfinite().all() and grad[..., 16:].isfinite().all()
        assert grad[:, ::3, :16].count_nonzero() == 0
    else:
        assert out.count_nonzero() == grad.count_nonzero() == 0


def test_addresses_beyond_32_bits():
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)  # pages that are not touched cost nothing
    x = memory.as_strided((2, 20, 48), (2**31, 48, 1))
    x.copy_(torch.randn(2, 20, 48))
    q, k, v = x.chunk(3, dim=-1)
    near = [t.clone() for t in (q, k, v)]
    assert torch.equal(kernels.rala(q, k, v, 1), kernels.rala(*near, 1))


# --- how they fit into PyTorch ----------------------------------------------------------------------------------------

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
