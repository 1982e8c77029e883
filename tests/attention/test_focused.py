# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What FLatten promises of its feature map, and the position tables of its keys."""

import pytest
import reference
import torch
import twins
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cosine_similarity
from twins import DIM, HEADS, build, tokens

from mmlinattn import ops
from mmlinattn.attention import Grid
from mmlinattn.layers import PositionTable
from mmlinattn.ops.focused import focused_map

few = settings(deadline=None, derandomize=True, max_examples=12)
POWERS = [1, 1.5, 2, 3, 3.5, 4, 5, 8, 16, 32]
every_power = pytest.mark.parametrize('power', POWERS)
ONES = torch.ones(DIM)


@every_power
def test_the_map_is_that_of_the_paper(power):
    """With its gradients; |phi_p(x)| = |ReLU(x)|: only the direction changes (Eq. 8); power 1 is ReLU."""
    x = torch.randn(2, 40, DIM, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(DIM, dtype=torch.float64, requires_grad=True)
    fast = focused_map(x, 1 / nn.functional.softplus(scale), power)
    reference.assert_twins(fast, reference.focused(x, scale, power), [x, scale])
    plain = focused_map(x, ONES.double(), power)
    torch.testing.assert_close(plain.norm(dim=-1), (x.relu() + 1e-6).norm(dim=-1))
    if power == 1:
        torch.testing.assert_close(plain, x.relu() + 1e-6)
    # no positive channel: eps in all of them, whatever the power, in float32
    dead = focused_map(-torch.rand(4, DIM), ONES, power)
    torch.testing.assert_close(dead, torch.full_like(dead, 1e-6), rtol=1e-4, atol=0)


@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_the_floor_unless_told_otherwise(backend):
    """1e-6, in the map and the normaliser; zeros get no gradient, as of ReLU."""
    q, k, v = torch.rand(3, 2, 6, 8, dtype=torch.float64)
    q, k, scale = q / 1000 - 5e-4, k / 1000 - 5e-4, torch.rand(8, dtype=torch.float64)
    heads = [reference.by_head(reference.focused(t, scale, 3, 1e-6), 2) for t in (q, k)]
    expected = reference.side_by_side(reference.linear_map(*heads, 1e-6) @ reference.by_head(v, 2))
    q, k = (t.clone().requires_grad_() for t in (q, k))
    with ops.use(backend):
        out = ops.focused_attention(q, k, v, 2, 1 / nn.functional.softplus(scale), 3)
        torch.testing.assert_close(out, expected)
        q, k = (torch.where(torch.rand(2, 6, 8) > 0.3, torch.rand(2, 6, 8), 0).requires_grad_() for _ in range(2))
        grads = torch.autograd.grad(ops.focused_attention(q, k, v.float(), 1, torch.ones(8), 3).square().sum(), (q, k))
    assert all((grad[x == 0] == 0).all() and grad[x > 0].any() for x, grad in zip((q, k), grads))


@pytest.mark.parametrize('frozen', ['x', 'scale'])
def test_one_of_the_two_may_be_frozen(frozen):
    """Fine-tuning with a frozen part."""
    x, scale = torch.randn(4, DIM), torch.rand(DIM) + 0.5
    leaf = (scale if frozen == 'x' else x).requires_grad_()
    (gradient,) = torch.autograd.grad(focused_map(x, scale, 3).square().sum(), leaf)
    both = focused_map(x.requires_grad_(), scale.requires_grad_(), 3).square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(both, leaf)[0])


def test_the_map_pulls_together_what_shares_its_largest_component_and_parts_the_rest():
    """Prop. 1: for some p > 1, similarity grows for pairs whose largest component coincides, falls for others."""
    x, y = torch.rand(2, 400, 6, dtype=torch.float64)
    # the largest components stand out by a fifth: how large p has to be depends on their lead
    for t in (x, y):
        t.scatter_(1, t.argmax(dim=1, keepdim=True), 1.2)
    same = x.argmax(dim=1) == y.argmax(dim=1)
    before = cosine_similarity(x, y)
    after = cosine_similarity(*(focused_map(t, torch.ones(6).double(), 32) for t in (x, y)))
    assert (after[same] > before[same]).all() and (after[~same] < before[~same]).all()


@pytest.mark.parametrize('autocast', [None, torch.float16, torch.bfloat16], ids=str)
@every_power
def test_every_power_is_finite_with_finite_gradients(power, autocast):
    """Large and tiny tokens, dead ones (no positive channel), one positive channel, large learned scales."""
    x = torch.randn(8, DIM)
    x[0] *= 1e4
    x[1] *= 1e-6
    x[2:4] = -x[2:4].abs()
    x[3, 1] = 50.0
    x[4] = 0
    x[5] = 60000.0
    x = x.to(autocast or x.dtype).requires_grad_()
    scale = torch.linspace(-8, 60, DIM).requires_grad_()
    for scales in (1 / nn.functional.softplus(scale), ONES):
        with torch.autocast('cpu', autocast or torch.bfloat16, enabled=autocast is not None):
            out = focused_map(x, scales, power)
        assert out.dtype == torch.float32 and out.isfinite().all()
        out.mean().backward()
        assert x.grad.isfinite().all() and scale.grad.isfinite().all()
    # by scales of float32, as parameters are under autocast: they are not rounded to the type of the tokens
    mild, given = x.detach()[6:], torch.rand(DIM) + 0.5
    assert torch.equal(focused_map(mild, given, power), focused_map(mild.float(), given, power))


@pytest.mark.parametrize('shape', [(0, 5, DIM), (3, 1, DIM), (70, 33, DIM), (2, 3, 1201, DIM)], ids=str)
@pytest.mark.parametrize('training', [False, True])
def test_many_rows_and_few(shape, training):
    """However many tokens are mapped at a time, also slices of a projection."""
    x, scale = torch.randn(*shape[:-1], 3 * DIM, requires_grad=training), torch.rand(DIM)
    for part in x.split(DIM, dim=-1):
        expected = reference.focused(part.double(), scale.double(), 3).float()
        found = focused_map(part, 1 / nn.functional.softplus(scale), 3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# --- position tables --------------------------------------------------------------------------


def bilinear(table, grid, size):
    """Bilinear with ``align_corners=False``, spelled out: pixel centres at (i + 1/2), clamped at the borders."""
    weights = []
    for axis in (0, 1):
        weight = torch.zeros(size[axis], grid[axis], dtype=table.dtype)
        for i in range(size[axis]):
            position = max((i + 0.5) * grid[axis] / size[axis] - 0.5, 0)
            low = min(int(position), grid[axis] - 1)
            weight[i, low] += 1 - (position - low)
            weight[i, min(low + 1, grid[axis] - 1)] += position - low
        weights.append(weight)
    return torch.einsum('ai,bj,ijc->abc', *weights, table[0].unflatten(0, grid)).flatten(0, 1)[None]


@few
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))
def test_tables_are_resized_bilinearly(height, width, prefix):
    """Class tokens keep their vectors; the trained grid its table as it is."""
    table = PositionTable(DIM, (4, 5), prefix).double()
    resized = table.resized(height, width)
    assert torch.equal(resized[:, :prefix], table.weight[:, :prefix])
    torch.testing.assert_close(resized[:, prefix:], bilinear(table.weight.data[:, prefix:], (4, 5), (height, width)))
    assert table.resized(4, 5) is table.weight


@pytest.mark.parametrize('prefix', [0, 1])
def test_a_checkpoints_table_of_another_square_fits(prefix):
    table, given = PositionTable(DIM, (6, 7), prefix), torch.randn(1, prefix + 16, DIM)
    fitted = table.fit(given)
    assert fitted.shape == table.weight.shape and torch.equal(fitted[:, :prefix], given[:, :prefix])
    torch.testing.assert_close(fitted[:, prefix:], bilinear(given[:, prefix:], (4, 4), (6, 7)))
    for other in (given[:, 1:], given[0], table.weight.data):  # no square, no table, and what fits as it is
        assert table.fit(other) is other


@pytest.mark.usefixtures('fast_forms')
@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_inference_resizes_once_and_notices_changes(mode):
    """Also of a model made for inference only; what was kept does not stop training."""
    with mode():
        table = PositionTable(DIM, (4, 5))
        first = table.resized(6, 7)
        assert mode is torch.inference_mode or table.resized(6, 7) is first
        assert table.resized(7, 6).shape[1] == 42
        table.weight.mul_(2)
        torch.testing.assert_close(table.resized(6, 7), 2 * first)
        table.load_state_dict(dict(weight=torch.ones(1, 20, DIM)))
        assert (table.resized(6, 7) == 1).all()
        table.weight.data = torch.zeros(1, 20, DIM)
        assert (table.resized(6, 7) == 0).all()
        assert table.double().resized(6, 7).dtype == torch.float64
        for value in range(5):  # freed memory is handed out again: an address says nothing about a weight that is gone
            table.weight = None
            table.weight = nn.Parameter(torch.full((1, 20, DIM), float(value)))
            torch.testing.assert_close(table.resized(6, 7), torch.full((1, 42, DIM), float(value)))
    trained = PositionTable(DIM, (4, 5))
    with torch.inference_mode():
        trained.resized(6, 7)
    trained.resized(6, 7).sum().backward()
    assert trained.weight.grad.abs().min() > 0


@pytest.mark.parametrize('prefix', [0, 1])
def test_a_resized_table_enters_the_keys(prefix):
    """Class tokens have no position."""
    attention, x, grid = build('focused', grid=(6, 4)), tokens(2, prefix + 15), Grid(3, 5, prefix)
    out, table = attention(x, grid), bilinear(attention.mixer.position.weight.data, (6, 4), (3, 5))
    attention.mixer.position.weight = nn.Parameter(torch.cat((torch.zeros(1, prefix, DIM), table), dim=1))
    torch.testing.assert_close(out, twins.twin(attention, 'focused', x, grid))


def test_the_local_weights_are_shared_by_the_heads():
    mixer, image = build('focused').mixer, torch.randn(2, DIM, 4, 6, dtype=torch.float64)
    assert mixer.local.weight.shape == (DIM // HEADS, 1, 5, 5)
    expected = torch.cat([mixer.local(part) for part in image.chunk(HEADS, dim=1)], dim=1)
    torch.testing.assert_close(mixer.shared_conv(image), expected)
