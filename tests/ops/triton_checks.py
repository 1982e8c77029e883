# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What holds for the GPU kernels: on a GPU compiled (``pytest tests/ops/triton_checks.py``), without one in Triton's
interpreter, for which ``test_triton.py`` starts a process with ``TRITON_INTERPRET=1``."""

# ruff: noqa: E402
import importlib.util
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip('triton')
tl = triton.language

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
# the interpreter is slow: between them, two ops pass through every line of the kernels
some_ops = pytest.mark.parametrize(
    'name', ['rala', 'focused_attention', *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPS)[1:3])]
)


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


def twins():
    path = Path(__file__).resolve().parent.parent / 'attention' / 'reference.py'
    spec = importlib.util.spec_from_file_location('quadratic_twins', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(tokens, d):
    angle = torch.rand(tokens, d // 2, device=DEVICE) * 6
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def inputs(name, batch=2, tokens=37, keys=None, heads=1, d=16, e=None, dtype=torch.float32, mask=False, **options):
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
    if options.pop('rotary', None):
        options['rotary'] = table(tokens, d)
    return [leaf.requires_grad_() for leaf in leaves], dict(num_heads=heads, **options)


def run(op, leaves, options):
    options = dict(options)
    tokens, more = (leaves[:1], leaves[1:]) if leaves[1:2] == [] or leaves[1].dim() == 1 else (leaves[:3], leaves[3:])
    q, k, v = tokens[0].chunk(3, dim=-1) if len(tokens) == 1 else tokens
    if more:
        options.update(zip(('inverse_scale', 'offset'), more))
    if options.get('mask') is not None:
        v = v * options['mask'].unsqueeze(-1).to(v.dtype)
    return op(q, k, v, **options)


def wide(leaves, options):
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return leaves, {
        key: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in options.items()
    }


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_follows_reference(name, **options):
    kernels, reference, _ = OPS[name]
    leaves, options = inputs(name, **options)
    out = run(kernels, leaves, options)
    assert out.is_contiguous() and out.dtype == leaves[0].dtype and 'mmlinattn' in str(out.grad_fn)
    wide_leaves, wide_options = wide(leaves, options)
    expected = run(reference, wide_leaves, wide_options)
    probe = normal(*out.shape, dtype=out.dtype)
    grads = torch.autograd.grad(out, leaves, probe)
    expected_grads = torch.autograd.grad(expected, wide_leaves, probe.double())
    tolerance = TOLERANCE[out.dtype]
    assert distance(out, expected) < tolerance
    for leaf, grad, expected_grad in zip(leaves, grads, expected_grads):
        assert grad.shape == leaf.shape and grad.dtype == leaf.dtype
        # some vanish but for eps: those of queries, of one token
        error = (grad.double() - expected_grad).norm()
        assert error < tolerance * (expected_grad.norm() + 0.1 * grad.numel() ** 0.5)


# --- values and gradients ---------------------------------------------------------------------------------------------

CASES = {
    'slices of a projection': dict(batch=1, heads=2),
    'padding, heads of 12': dict(d=12, mask=True),
    'several splits': dict(batch=1, tokens=300, heads=1),
}


@pytest.mark.parametrize('case', list(CASES))
@every_op
def test_float32(name, case):
    options = dict(CASES[case])
    if name == 'rala':
        options.update(rotary=True)
    if name == 'focused_attention':
        options.update(offset=True)
    assert_follows_reference(name, **options)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@some_ops
def test_half_precision(name, dtype):
    assert_follows_reference(
        name, batch=1, tokens=70, heads=1, dtype=dtype, **dict(rotary=True if name == 'rala' else None)
    )


@pytest.mark.parametrize(
    'options',
    [
        dict(name='inline_attention', kernel='exp'),
        dict(name='inline_attention', kernel='leakyrelu'),
        dict(name='linear_attention', kernel='softmax', d=20),
        dict(name='linear_attention', kernel='identity', eps=100.0),
        dict(name='rala', kernel='relu'),
        dict(name='rala', weight_scale=None, rotary=True, mask=True),
        dict(name='focused_attention', power=4.5),
    ],
    ids=lambda options: ' '.join(f'{key}={value}' for key, value in options.items()),
)
def test_maps(options):
    assert_follows_reference(batch=1, heads=1, **options)


@pytest.mark.parametrize('name', ['inline_attention', 'linear_attention', 'focused_attention'])
def test_reduced_keys_and_wide_values(name):
    assert_follows_reference(name, batch=1, tokens=20, keys=67, d=16, e=40, mask=True)


@every_op
def test_one_token(name):
    assert_follows_reference(name, tokens=1, heads=1)


# Each width with two ops, since all share the kernels; each op with a power of two, another, and one of two blocks.
WIDTHS = {
    'rala': (24, 64, 96),
    'inline_attention': (32, 48, 128),
    'linear_attention': (24, 32, 96),
    'focused_attention': (48, 64, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'd'), [(name, d) for name in OPS for d in WIDTHS[name]])
def test_head_widths(name, d):
    dtype = torch.float32 if d <= 64 else torch.float16
    assert_follows_reference(name, batch=1, tokens=71, heads=1, d=d, dtype=dtype, mask=True)


@pytest.mark.slow
@every_op
def test_many_images_and_splits(name):
    """The splits in float32: a few tokens of hundreds left out are less than the rounding of bfloat16."""
    assert_follows_reference(name, batch=24, tokens=9, heads=1, dtype=torch.bfloat16)
    assert_follows_reference(name, batch=1, tokens=520, heads=1, mask=True)


@pytest.mark.parametrize('name', ['rala', *(pytest.param(name, marks=pytest.mark.slow) for name in list(OPS)[1:])])
def test_more_splits_than_are_added_up_at_once(name, monkeypatch):
    """As maps of detectors have them, of fewer tokens each."""
    monkeypatch.setattr(launch, 'FEWEST_TOKENS', 16)
    assert launch.plan(1, 600, 1, 16, 16, torch.float32, 100, 16).splits > 16
    assert_follows_reference(name, batch=1, tokens=600, heads=1, mask=True)


def test_quadratic_twins():
    """The maps of N x N weights, written from the papers' equations."""
    literal = twins()
    q, k, v = (torch.randn(1, 12, 32, device=DEVICE) for _ in range(3))
    by_head = [t.double().cpu().unflatten(-1, (2, 16)).transpose(1, 2) for t in (q, k, v)]

    def merged(weights):
        return (weights @ by_head[2]).transpose(1, 2).flatten(2)

    from mmlinattn.layers import rotary_table

    elu = [literal.kernel(t, 'elu') for t in by_head[:2]]
    rotary = rotary_table(3, 4, 16, device=DEVICE)
    scale = torch.rand(32, dtype=torch.float64)
    focus = [literal.focused(t.double().cpu(), scale, 3).unflatten(-1, (2, 16)).transpose(1, 2) for t in (q, k)]
    inverse = (1 / torch.nn.functional.softplus(scale)).float().to(DEVICE)
    pairs = [
        (kernels.rala(q, k, v, 2, rotary=rotary), literal.rala_map(*elu, size=(3, 4))),
        (kernels.inline_attention(q, k, v, 2, 0.25), literal.inline_map(*by_head[:2], 0.25)),
        (kernels.linear_attention(q, k, v, 2, 'elu'), literal.linear_map(*elu)),
        (kernels.focused_attention(q, k, v, 2, inverse, 3), literal.linear_map(*focus)),
    ]
    for out, weights in pairs:
        assert distance(out.cpu(), merged(weights)) < 1e-5


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


def test_padding_changes_nothing():
    """Keys that are hidden may hold anything, an image of padding alone gives zeros."""
    for name, (op, _, _) in OPS.items():
        leaves, options = inputs(name, mask=True)
        with torch.no_grad():
            out = run(op, leaves, options)
            hidden = ~options['mask']
            leaves[0][..., 16:32][hidden] = 1e4
            if name != 'rala':  # whose hidden queries share the key's token
                leaves[0][..., :16][hidden] = 0
                out[hidden] = 0
            changed = run(op, leaves, options)
            if name != 'rala':
                changed[hidden] = 0
        torch.testing.assert_close(changed, out)
        assert out[-1].count_nonzero() == 0


def test_addresses_beyond_32_bits():
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)  # pages that are not touched cost nothing
    x = memory.as_strided((2, 20, 48), (2**31, 48, 1))
    x.copy_(torch.randn(2, 20, 48))
    q, k, v = x.chunk(3, dim=-1)
    near = [t.clone() for t in (q, k, v)]
    assert torch.equal(kernels.rala(q, k, v, 1), kernels.rala(*near, 1))
