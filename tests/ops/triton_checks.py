# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks of the Triton kernels: on a GPU compiled (``pytest tests/ops/triton_checks.py``), without one in Triton's
interpreter, for which ``test_triton.py`` starts a process with ``TRITON_INTERPRET=1``."""

# ruff: noqa: E402
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip('triton')
from mmlinattn.ops.triton import attention
from mmlinattn.ops.triton.kernels import INTERPRETED

if INTERPRETED:
    DEVICE = 'cpu'
    import interpreter
elif torch.cuda.is_available():
    DEVICE = 'cuda'
else:
    pytest.skip('needs a GPU or TRITON_INTERPRET=1', allow_module_level=True)

from mmlinattn import ops

OPS = {'rala': (ops.rala, dict(weight_scale=0.3)), 'linear_attention': (ops.linear_attention, dict(kernel='elu'))}
# relative to the norm; the interpreter cuts bfloat16 off where a GPU rounds
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.5e-2}
every_op = pytest.mark.parametrize('name', list(OPS))


@pytest.fixture(autouse=True)
def adversary(monkeypatch, request):
    """New memory holds NaN, and programs run in a random order. The fixture counts the kernels that ran."""
    empty, launch, ran = torch.empty, attention.launch, []

    def full_of_nan(*shape, **options):
        made = empty(*shape, **options)
        return made if made.requires_grad else made.fill_(float('nan'))

    monkeypatch.setattr(torch, 'empty', full_of_nan)
    monkeypatch.setattr(attention, 'launch', lambda *args, **more: (ran.append(args[0]), launch(*args, **more)))
    with ops.use('triton'):
        if not INTERPRETED:
            yield ran
            return
        with interpreter.shuffled(len(request.node.name)):
            yield ran


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
    options = {**OPS[name][1], **options}
    if mask:
        mask = torch.rand(batch, keys, device=DEVICE) > 0.3
        mask[0, 0], mask[-1] = True, batch == 1  # the last of several images is all padding
        options['mask'] = mask
    if options.pop('rotary', False):
        options['rotary'] = table(tokens, d)
    return [leaf.requires_grad_() for leaf in leaves], dict(num_heads=heads, **options)


def run(name, leaves, options):
    options = dict(options)
    q, k, v = leaves[0].chunk(3, dim=-1) if len(leaves) == 1 else leaves
    if 'rotary' in options:
        options['rotary'] = options['rotary'].to(torch.promote_types(q.dtype, torch.float32))
    if 'mask' in options:
        v = v * options['mask'].unsqueeze(-1).to(v.dtype)
    return OPS[name][0](q, k, v, **options)


def reference(name, leaves, options):
    with ops.use('reference'):
        return run(name, leaves, options)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_follows_reference(name, ran, fewest=256, **options):
    """Values and gradients beside the reference in float64; ``fewest`` tokens of a split."""
    leaves, options = inputs(name, **options)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with mock.patch.object(attention, 'FEWEST_TOKENS', fewest):
        out, expected = run(name, leaves, options), reference(name, wide, options)
        assert out.shape == expected.shape and out.dtype == leaves[0].dtype and out.is_contiguous()
        probe = normal(*out.shape, dtype=out.dtype)
        grads = torch.autograd.grad(out, leaves, probe)
    assert len(ran) == (6 if name == 'rala' and options['weight_scale'] else 4)
    expected_grads = torch.autograd.grad(expected, wide, probe.double())
    tolerance = TOLERANCE[out.dtype]
    assert distance(out, expected) < tolerance
    for leaf, grad, expected_grad in zip(leaves, grads, expected_grads):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype
        # some vanish but for eps: those of queries, of one token
        error = (grad.double() - expected_grad).norm()
        assert error < tolerance * (expected_grad.norm() + 0.3 * grad.numel() ** 0.5)


# --- values and gradients ---------------------------------------------------------------------------------------------

TURNED = dict(name='rala', rotary=True)
CASES = [
    dict(TURNED, heads=2),  # slices of a projection
    dict(TURNED, batch=2, d=12, mask=True),
    dict(TURNED, tokens=600, mask=True, fewest=16),  # more splits than are added up at once, as of detectors' maps
    dict(TURNED, batch=2, tokens=1),
    dict(TURNED, tokens=70, dtype=torch.float16),
    dict(TURNED, tokens=70, dtype=torch.bfloat16),
    dict(name='rala', kernel='relu'),
    dict(name='rala', weight_scale=None, rotary=True, mask=True),
    dict(name='linear_attention', heads=2, kernel='relu', eps=0.1),
    dict(name='linear_attention', batch=2, d=20, mask=True),
    dict(name='linear_attention', tokens=20, keys=367, e=40, mask=True),
    dict(name='linear_attention', tokens=70, dtype=torch.bfloat16),
]


@pytest.mark.parametrize('case', CASES, ids=lambda case: ' '.join(f'{key}={value}' for key, value in case.items()))
def test_values_and_gradients(case, adversary):
    assert_follows_reference(ran=adversary, **case)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@example('linear_attention', (1, 600, 600, 1), (16, 16), torch.float32, True, 16)
@example('rala', (1, 71, 71, 1), (96, 96), torch.bfloat16, True, 256)
@given(
    name=st.sampled_from(list(OPS)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(1, 60), st.integers(1, 3)),
    widths=st.tuples(*[st.integers(1, 33) | st.sampled_from([48, 64])] * 2),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    mask=st.booleans(),
    fewest=st.sampled_from([16, 256]),
)
def test_odd_shapes(name, sizes, widths, dtype, mask, fewest):
    (batch, tokens, keys, heads), (d, e) = sizes, widths
    shape = dict(batch=batch, tokens=tokens, keys=tokens if name == 'rala' else keys, heads=heads, d=d, e=e)
    ran = []
    with mock.patch.object(
        attention, 'launch', lambda *a, f=attention.launch, **more: (ran.append(a[0]), f(*a, **more))
    ):
        assert_follows_reference(name, ran, **shape, dtype=dtype, mask=mask, fewest=fewest)


@pytest.mark.parametrize('name', [*OPS, 'rala, turned'])
def test_dead_tokens_in_float16(name):
    """A query that is alive only where all keys are dead is divided by eps alone: quotients beyond float16, and finite
    gradients of the order of the reference's."""
    rotary = dict(rotary=True) if 'turned' in name else {}
    name = name.partition(',')[0]
    leaves, options = inputs(name, dtype=torch.float16, kernel='relu', **rotary)
    with torch.no_grad():
        q, k, _ = leaves[0].chunk(3, dim=-1)
        k[..., :4] = -1
        q[:, 3], q[:, 3, :4] = -1, 2
        q[:, 5] = -1
    out, expected = run(name, leaves, options), reference(name, leaves, options)
    probe = torch.full_like(out, 100.0)
    grad, other = (torch.autograd.grad(o, leaves, probe)[0] for o in (out, expected))
    assert out.isfinite().all() and other.isfinite().all() and grad.isfinite().all()
    q, k, v = grad.chunk(3, dim=-1)
    assert q[:, 5].count_nonzero() == k[..., :4].count_nonzero() == 0
    for found, exact in zip((q, k, v), other.chunk(3, dim=-1)):
        assert distance(found, exact) < 2e-2


@pytest.mark.parametrize('where', range(3))
@every_op
@pytest.mark.parametrize('kernel', ['elu', 'relu'])
def test_nan_of_an_input_shows_in_the_output(name, kernel, where):
    leaves, options = inputs(name, kernel=kernel)
    with torch.no_grad():
        leaves[0].chunk(3, dim=-1)[where][0, 20, 5] = float('nan')
    assert run(name, leaves, options)[0, 20].isnan().any()


def test_addresses_beyond_32_bits():
    memory = torch.empty_strided(
        (2**31 + 4096,), (1,), dtype=torch.float16, device=DEVICE
    )  # untouched pages cost nothing
    x = memory.as_strided((2, 20, 48), (2**31, 48, 1))
    x.copy_(torch.randn(2, 20, 48))
    q, k, v = x.chunk(3, dim=-1)
    near = [t.clone() for t in (q, k, v)]
    assert torch.equal(ops.rala(q, k, v, 1), ops.rala(*near, 1))


# --- how they fit into PyTorch ----------------------------------------------------------------------------------------


@every_op
def test_kernels_may_run_twice(name, monkeypatch):
    """None adds to what another run has left, or depends on the order of the programs: results are equal bit by bit."""
    once, results = attention.launch, []
    leaves, options = inputs(name, batch=2, tokens=300, mask=True)
    for times in (1, 2):
        monkeypatch.setattr(
            attention, 'launch', lambda *args, times=times, **more: [once(*args, **more) for _ in range(times)]
        )
        out = run(name, leaves, options)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_op
def test_gradients_of_gradients_and_batched_ones(name):
    """Also where keys are made of the queries."""
    x, options = normal(1, 9, 32).requires_grad_(), {**OPS[name][1], 'num_heads': 2}
    results = []
    for choice in ('triton', 'reference'):
        with ops.use(choice):
            out = OPS[name][0](x, x * 0.7, x, **options)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            second = torch.autograd.grad(grad.square().sum(), x, retain_graph=True)[0]
            probes = torch.stack((torch.ones_like(out), out.detach()))
            results.append([grad, second, torch.autograd.grad(out, x, probes, is_grads_batched=True)[0]])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


# --- calls that fall back to the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (dict(kernel='softmax'), "not for 'softmax'"),
        (dict(dtype=torch.float64), 'channels in torch.float64'),
        (dict(d=66), 'heads of 66 channels in torch.float32'),
        (dict(mask=torch.ones(1, 37, device=DEVICE)), ''),  # no bool
        (dict(rotary=torch.ones(1, 8, 2, device=DEVICE)), ''),  # broadcast
        (dict(rotary=torch.ones(37, 8, 2, device=DEVICE, requires_grad=True)), ''),  # learned
    ],
    ids=str,
)
def test_calls_without_a_kernel(change, said, adversary, recwarn):
    """Another map, type or width is said once; shapes that broadcast, and learned tables, are the reference's."""
    leaves, _ = inputs('rala', d=change.pop('d', 16), dtype=change.pop('dtype', torch.float32))
    q, k, v = leaves[0].chunk(3, dim=-1)
    ops.dispatch._has_kernel.cache_clear()
    ops.dispatch._say.cache_clear()
    for _ in range(2):
        try:
            ops.rala(q, k, v, 1, **change)
        except (RuntimeError, TypeError):  # as the reference does
            with pytest.raises((RuntimeError, TypeError)), ops.use('reference'):
                ops.rala(q, k, v, 1, **change)
    told = [str(w.message) for w in recwarn if 'mmlinattn' in str(w.message)]
    assert not adversary and len(told) == bool(said) and said in ''.join(told)


def test_an_error_in_a_kernel_is_an_error(monkeypatch):
    def fails(*args, **settings):
        raise RuntimeError('no such register')

    monkeypatch.setattr(attention, 'launch', fails)
    with pytest.raises(RuntimeError, match='no such register'):
        run('rala', *inputs('rala'))
