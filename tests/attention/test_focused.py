# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Focused linear attention against its N x N map, and what the paper promises of its feature map."""

import pytest
import reference
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from mmlinattn import ops
from mmlinattn.attention import Attention, FocusedMixer, Grid
from mmlinattn.layers import PositionTable
from mmlinattn.ops.focused import focused_map

DIM, HEADS, HEIGHT, WIDTH = 16, 2, 3, 5
HEAD_DIM = DIM // HEADS
GRID = Grid(HEIGHT, WIDTH)
POWERS = [1, 1.5, 2, 3, 3.5, 4, 5, 8, 16, 32]
ONES = torch.ones(DIM)


def build(grid=(HEIGHT, WIDTH), **options):
    attention = Attention(DIM, HEADS, dict(type='focused', **options), grid=grid).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def image_tokens(num=GRID.num_tokens, batch=2):
    return torch.randn(batch, num, DIM, dtype=torch.float64, requires_grad=True)


def literal(attention, x, power=3, focus=True, table=None):
    """``W_o (A v + DWConv(v))``, the map over all channels before the split into heads."""
    mixer = attention.mixer
    q, k, v = (
        x @ weight.T + bias for weight, bias in zip(attention.qkv.weight.split(DIM), attention.qkv.bias.split(DIM))
    )
    if mixer.position is not None:
        k = k + (mixer.position.weight if table is None else table)
    q, k = (reference.focused(t, mixer.scale, power) if focus else t.clamp(min=0) + 1e-6 for t in (q, k))
    q, k, values = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
    out = (reference.linear_map(q, k) @ values).transpose(1, 2).flatten(2)
    if mixer.local is not None:
        # the heads are images of a larger batch, so that all meet the same weights
        heads = torch.cat(v.chunk(HEADS, dim=-1))
        local = reference.local_term(heads, mixer.local.weight, mixer.local.bias, HEIGHT, WIDTH)
        out = out + torch.cat(local.chunk(HEADS), dim=-1)
    return out @ attention.proj.weight.T + attention.proj.bias


# --- the feature map --------------------------------------------------------------------------


@pytest.mark.parametrize('power', POWERS)
def test_the_map_is_that_of_the_paper_with_gradients(power):
    x = torch.randn(2, 40, DIM, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(DIM, dtype=torch.float64, requires_grad=True)
    fast = focused_map(x, 1 / nn.functional.softplus(scale), power)
    reference.assert_twins(fast, reference.focused(x, scale, power), [x, scale])


def test_gradients_of_the_map_are_those_of_finite_differences():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: focused_map(*inputs, 3), (x, scale))


@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_zeros_get_no_gradient_as_of_relu(backend):
    q, k, v = torch.rand(3, 2, 5, DIM).unbind()
    q[:, :, ::3], k[:, 1:, ::2] = 0, 0
    with ops.use(backend):
        out = ops.focused_attention(q.requires_grad_(), k.requires_grad_(), v, 1, torch.ones(DIM), 3)
        grads = torch.autograd.grad(out.square().sum(), (q, k))
    assert all((grad[x == 0] == 0).all() and grad[x > 0].any() for x, grad in zip((q, k), grads))


@pytest.mark.parametrize('frozen', ['x', 'scale'])
def test_one_of_the_two_may_be_frozen(frozen):
    """Fine-tuning with a frozen part."""
    x, scale = torch.randn(4, DIM), torch.rand(DIM) + 0.5
    leaf = (scale if frozen == 'x' else x).requires_grad_()
    (gradient,) = torch.autograd.grad(focused_map(x, scale, 3).square().sum(), leaf)
    both = focused_map(x.requires_grad_(), scale.requires_grad_(), 3).square().sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(both, leaf)[0])


@pytest.mark.parametrize('power', POWERS)
def test_the_map_preserves_norms(power):
    """|phi_p(x)| = |ReLU(x)|: only the direction changes (Eq. 8)."""
    x = torch.randn(100, DIM, dtype=torch.float64)
    lengths = focused_map(x, ONES.double(), power).norm(dim=-1)
    torch.testing.assert_close(lengths, (x.relu() + 1e-6).norm(dim=-1))


def test_power_one_is_relu():
    x = torch.randn(100, DIM, dtype=torch.float64)
    torch.testing.assert_close(focused_map(x, ONES.double(), 1), x.relu() + 1e-6)


def test_the_map_pulls_together_what_shares_its_largest_component_and_parts_the_rest():
    """Prop. 1: for some p > 1, similarity grows for pairs whose largest component coincides, falls for others."""
    x, y = torch.rand(2, 400, 6, dtype=torch.float64)
    # the largest components stand out by a fifth: how large p has to be depends on their lead
    for t in (x, y):
        t.scatter_(1, t.argmax(dim=1, keepdim=True), 1.2)
    same = x.argmax(dim=1) == y.argmax(dim=1)
    assert 20 < same.sum() < 380
    before = cosine_similarity(x, y)
    after = cosine_similarity(*(focused_map(t, torch.ones(6).double(), 32) for t in (x, y)))
    assert (after[same] > before[same]).all()
    assert (after[~same] < before[~same]).all()


@pytest.mark.parametrize('autocast', [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('power', POWERS)
def test_every_power_is_finite_with_finite_gradients(power, autocast):
    """Large and tiny tokens, dead ones (no positive channel), one positive channel, large learned scales."""
    x = torch.randn(8, DIM)
    x[0] *= 1e4
    x[1] *= 1e-6
    x[2] = -x[2].abs()
    x[3] = -x[3].abs()
    x[3, 1] = 50.0
    x[4] = 0
    x[5] = 60000.0
    scale = torch.linspace(-8, 60, DIM).requires_grad_()
    if autocast:
        x = x.to(autocast)
    x.requires_grad_()
    with torch.autocast('cpu', autocast or torch.bfloat16, enabled=autocast is not None):
        out = focused_map(x, 1 / nn.functional.softplus(scale), power)
    assert out.dtype == torch.float32
    assert out.isfinite().all()
    out.mean().backward()
    assert x.grad.isfinite().all() and scale.grad.isfinite().all()
    plain = focused_map(x, ONES, power)
    assert plain.isfinite().all()
    assert torch.autograd.grad(plain.float().sum(), x)[0].isfinite().all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_mapped_in_float32(dtype):
    """By scales of float32, as parameters are under autocast: they are not rounded to the type of the tokens."""
    x, scale = torch.randn(40, DIM).to(dtype), torch.rand(DIM) + 0.5
    assert torch.equal(focused_map(x, scale, 3), focused_map(x.float(), scale, 3))


@pytest.mark.parametrize('power', POWERS)
def test_a_dead_token_keeps_its_direction(power):
    """No positive channel: eps in all of them, whatever the power, in float32."""
    out = focused_map(-torch.rand(4, DIM), ONES, power)
    torch.testing.assert_close(out, torch.full_like(out, 1e-6), rtol=1e-4, atol=0)


@pytest.mark.parametrize('shape', [(0, 5, DIM), (3, 1, DIM), (70, 33, DIM), (2, 3, 1201, DIM)], ids=str)
@pytest.mark.parametrize('training', [False, True])
def test_many_rows_and_few(shape, training):
    """However many tokens are mapped at a time."""
    x = torch.randn(shape, requires_grad=training)
    scale = torch.rand(DIM)
    expected = reference.focused(x.double(), scale.double(), 3)
    torch.testing.assert_close(
        focused_map(x, 1 / nn.functional.softplus(scale), 3), expected.float(), rtol=1e-5, atol=1e-6
    )


def test_slices_of_a_projection_are_mapped_without_a_copy_in_between():
    """q and k are views of one matrix of the tokens."""
    qkv = torch.randn(2, 700, 3 * DIM)
    for part in qkv.split(DIM, dim=-1):
        torch.testing.assert_close(focused_map(part, ONES, 3), focused_map(part.contiguous(), ONES, 3))


# --- the attention ----------------------------------------------------------------------------

FORMS = {
    'release': dict(),
    'without the local term': dict(local_kernel=None),
    'local kernel 3': dict(local_kernel=3),
    'without the focused map': dict(focus=False),
    'power 1': dict(power=1),
    'power 32': dict(power=32),
}


@pytest.mark.parametrize('grid', [None, (HEIGHT, WIDTH)], ids=['no table', 'table'])
@pytest.mark.parametrize('options', FORMS.values(), ids=FORMS)
def test_every_form_equals_its_quadratic_twin(options, grid):
    attention, x = build(grid, **options), image_tokens()
    slow = literal(attention, x, options.get('power', 3), options.get('focus', True))
    leaves = [x, *attention.parameters()]
    assert len(list(attention.mixer.parameters())) == sum(
        (grid is not None, options.get('focus', True), 2 * bool(options.get('local_kernel', 5)))
    )
    reference.assert_twins(attention(x, GRID), slow, leaves)


def test_the_local_weights_are_shared_by_the_heads():
    mixer = FocusedMixer(DIM, HEADS)
    assert mixer.local.weight.shape == (HEAD_DIM, 1, 5, 5)
    image = torch.randn(2, DIM, 4, 6)
    expected = torch.cat([mixer.local(part) for part in image.chunk(HEADS, dim=1)], dim=1)
    torch.testing.assert_close(mixer.shared_conv(image), expected)


def test_a_class_token_has_neither_position_nor_neighbours():
    attention = build()
    x = image_tokens(GRID.num_tokens + 1)
    out = attention(x, Grid(HEIGHT, WIDTH, prefix=1))
    table = torch.cat((torch.zeros(1, 1, DIM), attention.mixer.position.weight), dim=1)
    local, attention.mixer.local = attention.mixer.local, None
    slow = literal(attention, x, table=table)
    v = (x @ attention.qkv.weight[2 * DIM :].T + attention.qkv.bias[2 * DIM :])[:, 1:]
    heads = torch.cat(v.chunk(HEADS, dim=-1))
    term = reference.local_term(heads, local.weight, local.bias, HEIGHT, WIDTH)
    term = torch.cat(term.chunk(HEADS), dim=-1) @ attention.proj.weight.T
    torch.testing.assert_close(out[:, :1], slow[:, :1])
    torch.testing.assert_close(out[:, 1:], slow[:, 1:] + term)


@pytest.mark.parametrize('power', [0.5, 0, -1, 33, None, '3'])
def test_power_out_of_range(power):
    with pytest.raises(ValueError, match=rf'power={power} \(focusing factor\) has to lie in \[1, 32\]'):
        FocusedMixer(DIM, HEADS, power=power)


# --- position tables --------------------------------------------------------------------------


def bilinear(table, grid, size):
    """Bilinear with ``align_corners=False``, spelled out: pixel centres at (i + 1/2), clamped at the borders."""
    values = table[0].unflatten(0, grid)
    out = torch.empty(*size, table.shape[-1], dtype=table.dtype)
    for y in range(size[0]):
        for x in range(size[1]):
            corners = []
            for i, axis in ((y, 0), (x, 1)):
                position = max((i + 0.5) * grid[axis] / size[axis] - 0.5, 0)
                low = min(int(position), grid[axis] - 1)
                high = min(low + 1, grid[axis] - 1)
                corners.append(((low, 1 - (position - low)), (high, position - low)))
            out[y, x] = sum(values[i, j] * a * b for i, a in corners[0] for j, b in corners[1])
    return out.flatten(0, 1)[None]


@pytest.mark.parametrize('size', [(6, 9), (2, 3), (1, 1), (1, 20), (4, 5), (3, 5)], ids=str)
def test_tables_are_resized_bilinearly(size):
    table = PositionTable(DIM, (4, 5)).double()
    torch.testing.assert_close(table.resized(*size), bilinear(table.weight.data, (4, 5), size))


def test_class_tokens_keep_their_vectors():
    table = PositionTable(DIM, (4, 5), prefix=2).double()
    resized = table.resized(6, 7)
    assert torch.equal(resized[:, :2], table.weight[:, :2])
    torch.testing.assert_close(resized[:, 2:], bilinear(table.weight.data[:, 2:], (4, 5), (6, 7)))


@pytest.mark.parametrize('prefix', [0, 1])
def test_a_checkpoints_table_of_another_square_fits(prefix):
    table, given = PositionTable(DIM, (6, 7), prefix), torch.randn(1, prefix + 16, DIM)
    fitted = table.fit(given)
    assert fitted.shape == table.weight.shape and torch.equal(fitted[:, :prefix], given[:, :prefix])
    torch.testing.assert_close(fitted[:, prefix:], bilinear(given[:, prefix:], (4, 4), (6, 7)))
    for other in (given[:, 1:], given[0], table.weight.data):  # no square, no table, and what fits as it is
        assert table.fit(other) is other


def test_at_the_trained_grid_the_table_is_added_as_it_is():
    table = PositionTable(DIM, (4, 5))
    assert table.resized(4, 5) is table.weight


@pytest.mark.usefixtures('fast_forms')
def test_inference_resizes_once_and_notices_changes():
    table = PositionTable(DIM, (4, 5))
    with torch.no_grad():
        first = table.resized(6, 7)
        assert table.resized(6, 7) is first
        assert table.resized(7, 6).shape[1] == 42
        table.weight.mul_(2)
        torch.testing.assert_close(table.resized(6, 7), 2 * first)
        table.load_state_dict(dict(weight=torch.ones(1, 20, DIM)))
        assert (table.resized(6, 7) == 1).all()
        table.weight.data = torch.zeros(1, 20, DIM)
        assert (table.resized(6, 7) == 0).all()
        assert table.double().resized(6, 7).dtype == torch.float64
        table.weight = nn.Parameter(torch.full((1, 20, DIM), 4.0))
        assert (table.resized(6, 7) == 4).all()


def test_a_new_table_at_the_address_of_an_old_one_is_noticed():
    """Freed memory is handed out again: an address says nothing about a weight that is gone."""
    table = PositionTable(DIM, (4, 5))
    with torch.no_grad():
        for value in range(5):
            table.weight = None
            table.weight = nn.Parameter(torch.full((1, 20, DIM), float(value)))
            torch.testing.assert_close(table.resized(6, 7), torch.full((1, 42, DIM), float(value)))


def test_a_model_made_for_inference_only():
    with torch.inference_mode():
        table = PositionTable(DIM, (4, 5))
        first = table.resized(6, 7)
        table.weight.mul_(2)
        torch.testing.assert_close(table.resized(6, 7), 2 * first)


def test_a_table_kept_from_inference_does_not_stop_training():
    table = PositionTable(DIM, (4, 5))
    with torch.inference_mode():
        table.resized(6, 7)
    table.resized(6, 7).sum().backward()
    assert table.weight.grad.abs().min() > 0


def test_a_resized_table_of_the_mixer_enters_the_keys():
    attention, x = build((6, 4)), image_tokens()
    table = bilinear(attention.mixer.position.weight.data, (6, 4), (HEIGHT, WIDTH))
    torch.testing.assert_close(attention(x, GRID), literal(attention, x, table=table))
