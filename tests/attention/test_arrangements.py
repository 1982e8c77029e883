# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whole maps, reduced keys, windows and stripes against loops over their parts."""

import itertools
import math

import pytest
import torch
from helpers.references import ATTENTIONS, DIM, FIRST, HEADS, assert_same, attend, build, filled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad

from mmlinattn.attention import Attention, GlobalAttention, Grid, StageContext, WindowAttention
from mmlinattn.attention.arrangements import ReducedAttention, StripeAttention
from mmlinattn.layers import RelativePositionBias
from mmlinattn.ops.windows import Axis, Windows

MIXERS = list(FIRST.values())
SEQUENTIAL = [name for name in ATTENTIONS if build(name).mixer.sequential]
LINEAR = [name for name in (*MIXERS, 'rala, tanh', 'inline, division') if not build(name).mixer.quadratic]
few = settings(deadline=None, derandomize=True, max_examples=8)
sizes = st.integers(1, 9)


def feature_map(height, width, batch=2):
    return torch.randn(batch, height, width, DIM, dtype=torch.float64, requires_grad=True)


def leaves_of(attention, *inputs):
    return [*inputs, *attention.parameters()]


def parts(size, rows, columns):
    for y, x in itertools.product(range(0, size[0], rows), range(0, size[1], columns)):
        yield slice(None), slice(y, y + rows), slice(x, x + columns)


@pytest.mark.parametrize('name', [*SEQUENTIAL, *MIXERS])
def test_the_whole_map_is_its_tokens_row_by_row(name):
    x = feature_map(3, 5)
    attention, context = filled(GlobalAttention(DIM, HEADS, ATTENTIONS[name])), StageContext.of(x)
    tokens = attend(attention, x.flatten(1, 2), Grid(3, 5)).unflatten(1, (3, 5))
    torch.testing.assert_close(attention(x, context), tokens)
    window = WindowAttention(DIM, HEADS, ATTENTIONS[name], None).double()
    window.load_state_dict(attention.state_dict())
    torch.testing.assert_close(window(x, context), tokens)


@pytest.mark.parametrize('name', ['softmax', 'hallucinated ihh-chh', 'focused, no convolution'])
@few
@given(sizes, sizes, st.integers(1, 3))
def test_reduced_keys(name, height, width, ratio):
    """Take keys and values from a strided convolution of the zero-padded map, and a norm."""
    attention = filled(ReducedAttention(DIM, HEADS, ATTENTIONS[name], ratio, dict(type='LN')))
    x = feature_map(height, width)
    rows, columns = math.ceil(height / ratio), math.ceil(width / ratio)
    padded = pad(x, (0, 0, 0, ratio * columns - width, 0, ratio * rows - height))
    reduced = attention.sr.bias
    for i, j in itertools.product(range(ratio), range(ratio)):
        reduced = reduced + padded[:, i::ratio, j::ratio] @ attention.sr.weight[:, :, i, j].T
    reduced = attention.norm(reduced).flatten(1, 2)
    expected = attend(attention, x.flatten(1, 2), Grid(height, width), reduced, Grid(rows, columns))
    expected = expected.unflatten(1, (height, width))
    assert_same(attention(x, StageContext.of(x)), expected, leaves_of(attention, x), rtol=1e-6)


def test_windows_are_clipped_to_the_map():
    assert Windows.fit(5, 9, (7, 7), True) == Windows(5, 9, (5, 7), (0, 3))
    assert Windows.fit(7, 7, (7, 7), True) == Windows(7, 7, (7, 7), (0, 0))
    assert Windows.fit(5, 9, None, True) == Windows(5, 9, (5, 9), (0, 0))
    x, whole = torch.randn(2, 5, 9, 3), Windows.fit(5, 9, (56, 56))
    assert whole.is_whole  # one window is the map without a copy
    assert whole.partition(x).data_ptr() == whole.merge(whole.partition(x)).data_ptr() == x.data_ptr()


def test_positions_of_open_windows_are_on_the_device_of_the_map():
    axis, x = Axis(7, 2, shift=True), torch.empty(1, 7, 7, 3, device='meta')
    assert axis.positions(x).shape == (4, 2)
    assert axis.positions(x).device == axis.region(x).device == x.device


@pytest.mark.parametrize('name', LINEAR)
@few
@example(7, 9, (3, 4))
@given(sizes, sizes, st.tuples(sizes, sizes))
def test_linear_attention_in_windows_is_that_of_each_window_cropped(name, height, width, window):
    attention = filled(WindowAttention(DIM, HEADS, ATTENTIONS[name], window))
    x, other = (feature_map(height, width) for _ in range(2))
    expected = torch.empty_like(x)
    for where in parts((height, width), *window):
        crop, source = x[where], other[where].flatten(1, 2)
        grid = Grid(*crop.shape[1:3])
        alone = attend(attention, crop.flatten(1, 2), grid, source=source)
        expected[where] = alone.unflatten(1, grid[:2])
    out = attention(x, StageContext.of(x)._replace(source=other))
    assert_same(out, expected, leaves_of(attention, x, other), rtol=1e-6)


@few
@given(sizes, sizes)
def test_focused_attention_in_windows_is_that_of_each_window_cropped(height, width):
    """Crop the position table of a partial window to its upper left part."""
    window = min(3, height), min(3, width)
    x = feature_map(height, width)
    attention = filled(WindowAttention(DIM, HEADS, 'focused', (3, 3), grid=(3, 3)))
    out, table = attention(x, StageContext.of(x)), attention.mixer.position(Grid(*window)).unflatten(1, window)
    for where in parts((height, width), *window):
        grid = Grid(*x[where].shape[1:3])
        part = filled(Attention(DIM, HEADS, 'focused', grid=grid[:2]))
        corner = table[:, : grid.height, : grid.width].flatten(1, 2)
        part.load_state_dict({**attention.state_dict(), 'mixer.position.weight': corner})
        torch.testing.assert_close(out[where], part(x[where].flatten(1, 2), StageContext(grid)).unflatten(1, grid[:2]))


def softmax_window_by_pairs(attention, x, window, shift):
    """Compute softmax attention over all pairs of tokens in one window and on one side of the cyclic shift's seam."""
    size, (rows, columns) = x.shape[1:3], window
    cut = Windows.fit(*size, window, shift)
    places = torch.cartesian_prod(*map(torch.arange, size))
    rolled = (places - torch.tensor(cut.shift)) % torch.tensor(cut.padded)
    part, offset = rolled // torch.tensor(cut.window), places[:, None] - places
    meets = (part[:, None] == part).all(dim=-1) & (rolled[:, None] - rolled == offset).all(dim=-1)
    index = (offset[..., 0] + rows - 1) * (2 * columns - 1) + offset[..., 1] + columns - 1
    bias = attention.relative_bias.table[index * meets].permute(2, 0, 1)
    q, k, v = (t.flatten(1, 2).unflatten(-1, (HEADS, -1)) for t in attention.qkv(x).chunk(3, dim=-1))
    scores = torch.einsum('bihd,bjhd->bhij', q, k) / math.sqrt(DIM // HEADS) + bias
    weights = scores.masked_fill(~meets, -math.inf).softmax(dim=-1)
    return attention.proj(torch.einsum('bhij,bjhd->bihd', weights, v).flatten(2).unflatten(1, size))


@few
@example(7, 9, (4, 4), True)
@example(3, 8, (3, 3), True)
@given(st.integers(1, 7), st.integers(1, 7), st.tuples(st.integers(2, 4), st.integers(2, 4)), st.booleans())
def test_softmax_in_shifted_windows_equals_a_loop_over_pairs(height, width, window, shift):
    attention = filled(WindowAttention(DIM, HEADS, 'softmax', window, shift=shift, relative_bias=True))
    x = feature_map(height, width)
    slow = softmax_window_by_pairs(attention, x, window, shift)
    assert_same(attention(x, StageContext.of(x)), slow, leaves_of(attention, x), rtol=1e-6)
    torch.testing.assert_close(attention(x, StageContext(Grid(height, width))), slow)


@pytest.mark.parametrize('height, width', [(7, 9), (8, 8)])
def test_windows_of_a_rolled_map_have_no_neighbours_from_its_other_side(height, width):
    """Separate up to four regions, in attention and in IHH's convolution, with and without padding between them."""
    attention = filled(WindowAttention(DIM, HEADS, 'hallucinated', (4, 4), shift=True, relative_bias=True))
    x = feature_map(height, width)
    out = attention(x, StageContext.of(x))
    # each part of the rolled map alone, cut as the shift of 2 cuts it
    rows, columns = ((slice(0, 2), slice(2, 6), slice(6, end)) for end in (height, width))
    for high, wide in itertools.product(rows, columns):
        part = x[:, high, wide]
        grid = Grid(*part.shape[1:3])
        alone = attend(attention, part.flatten(1, 2), grid, bias=attention.relative_bias(*grid[:2])[None])
        torch.testing.assert_close(out[:, high, wide], alone.unflatten(1, grid[:2]))


@pytest.mark.parametrize('name', MIXERS)
@few
@example(7, 9, 4)
@given(sizes, sizes, st.integers(1, 3))
def test_stripes_are_two_halves_of_windows(name, height, width, stripe):
    attention = filled(StripeAttention(DIM, HEADS, ATTENTIONS[name], stripe))
    x = feature_map(height, width)
    thirds = [part.chunk(2, dim=-1) for part in attention.qkv(x).split([2 * w for w in attention.widths], dim=-1)]
    halves = []
    for i, (rows, columns) in enumerate(((height, stripe), (stripe, width))):
        half = torch.empty_like(thirds[2][i])
        for where in parts((height, width), rows, columns):
            crops = [part[i][where] for part in thirds]
            grid = Grid(*crops[0].shape[1:3])
            q, k, v, *gate = (crop.flatten(1, 2) for crop in crops)
            source = x.chunk(2, dim=-1)[i][where].flatten(1, 2)
            mixed = attention.branches[i].mix(q, k, v, grid, context=source.mean(dim=1))
            half[where] = (mixed * gate[0] if gate else mixed).unflatten(1, grid[:2])
        halves.append(half)
    slow = attention.proj(torch.cat(halves, dim=-1))
    leaves = leaves_of(attention, x)
    assert_same(attention(x, StageContext.of(x)), slow, leaves, rtol=1e-6)
    torch.testing.assert_close(attention(x, StageContext(Grid(height, width), source=x)), slow)


def test_defaults_of_arrangements():
    for branch in StripeAttention(DIM, HEADS, 'softmax', 2).branches:
        assert branch.local.weight.shape == (DIM // 2, 1, 3, 3) and branch.local.padding == (1, 1)
    without = StripeAttention(DIM, HEADS, 'softmax', 2, local_kernel=None)
    assert [branch.local for branch in without.branches] == [None, None]
    gated = [StripeAttention(DIM, HEADS, ATTENTIONS[name], 2) for name in ('rala', 'rala, no gate')]
    assert [attention.qkv.out_features for attention in gated] == [4 * DIM, 3 * DIM]

    def bias(mixer, window, relative_bias=True):
        return WindowAttention(DIM, HEADS, mixer, window, relative_bias=relative_bias).relative_bias

    assert bias('softmax', (3, 4)).table.shape == (5 * 7, HEADS) and bias('softmax', (9, 9)).table.std() < 0.03
    assert bias('hallucinated', (3, 4)).table.shape == (5 * 7, 2 * HEADS)
    assert [bias('rala', (3, 4)), bias('softmax', None), bias('softmax', (3, 4), False)] == [None] * 3
    with torch.device('meta'):  # 8192 tokens, whatever the sides
        assert RelativePositionBias((64, 128), 1).table.shape == (127 * 255, 1)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize('source, window', [(3, (5, 5)), (6, (3, 3)), (4, (4, 4)), (2, (2, 3))])
def test_bias_tables_of_another_window_are_resized_bicubically(source, window, dtype):
    """Resize Swin's bias tables for fine-tuning at 384, columns last, in the dtype of the file."""
    bias, n = RelativePositionBias(window, 2).double(), 2 * source - 1
    table = torch.randn(n * n, 2, dtype=torch.float64)
    image = table.T.unflatten(1, (n, n))[None]
    size = tuple(2 * length - 1 for length in window)
    expected = interpolate(image, size, mode='bicubic', align_corners=False)[0].flatten(1).T
    fitted = bias.fit(table.to(dtype))
    assert fitted.dtype == dtype
    error = 1e-5 if dtype == torch.float64 else 0.01  # in float32
    torch.testing.assert_close(fitted.double(), expected, rtol=error, atol=error)
