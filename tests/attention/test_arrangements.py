# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Whole maps, reduced keys, windows and stripes against loops over their parts."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from mmlinattn.attention import (
    Attention,
    GlobalAttention,
    Grid,
    MapWindows,
    ReducedAttention,
    StripeAttention,
    WindowAttention,
    windows,
)
from mmlinattn.attention.arrangements import RelativePositionBias
from mmlinattn.attention.windows import Axis

DIM, HEADS = 16, 2
MIXERS = ['softmax', 'rala', 'inline', 'focused']
LINEAR = ['rala', 'inline', 'focused', dict(type='inline', injective=False, kernel='exp')]
SIZES = [(6, 8), (7, 9), (1, 9), (9, 1), (3, 2), (1, 1)]


def filled(module):
    module = module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def feature_map(height, width, batch=2):
    return torch.randn(batch, height, width, DIM, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def poisoned(monkeypatch):
    """Padding of windows holds large values in place of zeros."""

    def poison(value):
        def fill(x, widths):
            return pad(x, widths, value=value if x.is_floating_point() else 0)  # the mask itself stays

        monkeypatch.setattr(windows, 'F', SimpleNamespace(pad=fill))

    return poison


# --- whole maps and reduced keys ---------------------------------------------------------------


@pytest.mark.parametrize('mixer', MIXERS)
def test_the_whole_map_is_its_tokens_row_by_row(mixer):
    attention, x = filled(GlobalAttention(DIM, HEADS, mixer)), feature_map(3, 5)
    tokens = Attention.forward(attention, x.flatten(1, 2), Grid(3, 5))
    torch.testing.assert_close(attention(x).flatten(1, 2), tokens)


@pytest.mark.parametrize('mixer', ['softmax', 'focused', 'inline'])
@pytest.mark.parametrize('size', [(4, 6), (5, 7), (1, 3)], ids=str)
def test_reduced_keys(size, mixer):
    """Keys and values: a strided convolution of the zero-padded map, and a norm."""
    mixer = dict(type=mixer, local_kernel=None) if mixer == 'focused' else mixer
    mixer = dict(type=mixer, local_residual=False) if mixer == 'inline' else mixer
    attention = filled(ReducedAttention(DIM, HEADS, mixer, 2, dict(type='LN')))
    x = feature_map(*size)
    rows, columns = math.ceil(size[0] / 2), math.ceil(size[1] / 2)
    padded = torch.zeros(2, 2 * rows, 2 * columns, DIM, dtype=torch.float64)
    padded[:, : size[0], : size[1]] = x
    reduced = torch.zeros(2, rows, columns, DIM, dtype=torch.float64) + attention.sr.bias
    for i, j in itertools.product(range(2), range(2)):
        reduced = reduced + padded[:, i::2, j::2] @ attention.sr.weight[:, :, i, j].T
    reduced = attention.norm(reduced).flatten(1, 2)
    expected = Attention.forward(
        attention, x.flatten(1, 2), Grid(*size), kv=reduced, key_grid=Grid(rows, columns)
    ).unflatten(1, size)
    torch.testing.assert_close(attention(x), expected)


# --- windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize('window', [(3, 3), (4, 2), None], ids=str)
@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('mixer', [m for m in LINEAR if m != 'focused'], ids=str)
def test_linear_attention_in_windows_is_that_of_each_window_cropped(mixer, size, window):
    """The last row and column of windows hold fewer tokens: sums, means, N and the local residual are theirs,
    and the mean of the tokens that they are told of."""
    attention, x, context = filled(WindowAttention(DIM, HEADS, mixer, window)), feature_map(*size), feature_map(*size)
    out = attention(x, context_tokens=context)
    rows, columns = window or size
    for y, x0 in itertools.product(range(0, size[0], rows), range(0, size[1], columns)):
        crop, source = (values[:, y : y + rows, x0 : x0 + columns] for values in (x, context))
        grid, tokens = Grid(*crop.shape[1:3]), crop.flatten(1, 2)
        expected = Attention.forward(attention, tokens, grid, context_tokens=source.flatten(1, 2))
        torch.testing.assert_close(out[:, y : y + rows, x0 : x0 + columns], expected.unflatten(1, grid[:2]))


@pytest.mark.parametrize('size', SIZES, ids=str)
def test_focused_attention_in_windows_is_that_of_each_window_cropped(size):
    """A partial window meets the upper left part of the position table."""
    window = tuple(min(3, side) for side in size)
    attention, x = filled(WindowAttention(DIM, HEADS, 'focused', (3, 3), grid=(3, 3))), feature_map(*size)
    out = attention(x)
    table = attention.mixer.position.resized(*window).unflatten(1, window)
    for y, x0 in itertools.product(range(0, size[0], window[0]), range(0, size[1], window[1])):
        crop = x[:, y : y + window[0], x0 : x0 + window[1]]
        height, width = crop.shape[1:3]
        part = filled(Attention(DIM, HEADS, 'focused', grid=(height, width)))
        state = attention.state_dict()
        state['mixer.position.weight'] = table[:, :height, :width].flatten(1, 2)
        part.load_state_dict(state)
        expected = part(crop.flatten(1, 2), Grid(height, width)).unflatten(1, (height, width))
        torch.testing.assert_close(out[:, y : y + window[0], x0 : x0 + window[1]], expected)


def literal_softmax_window(attention, x, window, shift):
    """Token by token: who is in the same window, and on the same side of the seam that the roll made."""
    _, height, width, _ = x.shape
    cut = windows.Windows.fit(height, width, window, shift)
    rolled = {
        (y, x): ((y - cut.shift[0]) % cut.padded[0], (x - cut.shift[1]) % cut.padded[1])
        for y, x in itertools.product(range(height), range(width))
    }
    q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in attention.qkv(x).chunk(3, dim=-1))
    rows, columns = window
    out = torch.empty_like(v)
    for (y, x0), (ry, rx) in rolled.items():
        scores, values = [], []
        for (ky, kx), (sy, sx) in rolled.items():
            same_window = ry // cut.window[0] == sy // cut.window[0] and rx // cut.window[1] == sx // cut.window[1]
            if not same_window or (ky - y, kx - x0) != (sy - ry, sx - rx):
                continue
            offset = (y - ky + rows - 1) * (2 * columns - 1) + x0 - kx + columns - 1
            bias = attention.relative_bias.table[offset]
            scores.append((q[:, y, x0] * k[:, ky, kx]).sum(-1) / math.sqrt(DIM // HEADS) + bias)
            values.append(v[:, ky, kx])
        weight = torch.stack(scores).exp()
        out[:, y, x0] = ((weight / weight.sum(0))[..., None] * torch.stack(values)).sum(0)
    return attention.proj(out.flatten(-2))


@pytest.mark.parametrize('shift', [False, True], ids=['', 'shifted'])
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_softmax_in_shifted_windows_equals_a_loop_over_pairs(size, shift):
    """Relative positions and the seam included, padding excluded."""
    attention = filled(WindowAttention(DIM, HEADS, 'softmax', (4, 4), shift=shift, relative_bias=True))
    x = feature_map(*size)
    fast = attention(x)
    slow = literal_softmax_window(attention, x, (4, 4), shift)
    torch.testing.assert_close(fast, slow)
    probe = torch.randn_like(slow)
    leaves = [x, attention.relative_bias.table, attention.qkv.weight]
    ours = torch.autograd.grad((fast * probe).sum(), leaves)
    for mine, other in zip(ours, torch.autograd.grad((slow * probe).sum(), leaves)):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize('shift', [False, True], ids=['', 'shifted'])
@pytest.mark.parametrize('size', [(7, 9), (1, 9), (5, 4)], ids=str)
@pytest.mark.parametrize('mixer', MIXERS)
def test_what_the_padding_of_a_window_holds_has_no_influence(mixer, size, shift, poisoned):
    attention = filled(
        WindowAttention(
            DIM,
            HEADS,
            mixer,
            (4, 4),
            shift=shift and mixer == 'softmax',
            relative_bias=True,
            grid=(4, 4),
            local_kernel=3,
        )
    )
    x = feature_map(*size)
    expected = attention(x)
    probe = torch.randn_like(expected)
    leaves = [x, *attention.parameters()]
    gradients = torch.autograd.grad((expected * probe).sum(), leaves)
    for value in (5.0, -300.0):
        poisoned(value)
        out = attention(x)
        torch.testing.assert_close(out, expected)
        for mine, other in zip(torch.autograd.grad((out * probe).sum(), leaves), gradients):
            torch.testing.assert_close(mine, other)


def test_the_cuts_of_a_map_are_made_once_for_all_blocks():
    x = feature_map(7, 9)
    map_windows = MapWindows(x)
    assert map_windows.get((4, 4), True) is map_windows.get((4, 4), True)
    attention = filled(WindowAttention(DIM, HEADS, 'softmax', (4, 4), shift=True, relative_bias=True))
    torch.testing.assert_close(attention(x, map_windows=map_windows), attention(x))


def test_cuts_of_one_map_by_different_blocks_are_kept_apart():
    """Blocks of a stage may differ in windows, in their shift, and in the direction of their stripes."""
    map_windows = MapWindows(feature_map(7, 9))
    found = {}
    for _ in range(2):  # made, and kept
        for window, shift in [((4, 4), False), ((4, 4), True), ((2, 3), False), ((None, 4), False), ((4, None), False)]:
            cut, real, foreign = map_windows.get(window, shift)
            shapes = [None if mask is None else tuple(mask.shape) for mask in (real, foreign)]
            found[window, shift] = cut.window, cut.shift, *shapes
    assert found == {
        ((4, 4), False): ((4, 4), (0, 0), (2 * 6, 16), None),
        ((4, 4), True): ((4, 4), (2, 2), (2 * 6, 16), (6, 1, 16, 16)),
        ((2, 3), False): ((2, 3), (0, 0), (2 * 12, 6), None),
        ((None, 4), False): ((7, 4), (0, 0), (2 * 3, 28), None),
        ((4, None), False): ((4, 9), (0, 0), (2 * 2, 36), None),
    }


def test_which_blocks_have_a_relative_position_bias():
    """Those that ask for one, of an attention that takes one, in windows: of whole maps it would not be bounded."""

    def bias(mixer, window, relative_bias=True):
        return WindowAttention(DIM, HEADS, mixer, window, relative_bias=relative_bias).relative_bias

    assert bias('softmax', (3, 4)).table.shape == (5 * 7, HEADS)
    assert bias('hallucinated', (3, 4)).table.shape == (5 * 7, 2 * HEADS)
    assert bias('rala', (3, 4)) is bias('softmax', None) is bias('softmax', (3, 4), False) is None


def test_attentions_that_read_a_sequence_take_whole_maps_only():
    sequence = dict(type='angular', conv='sequence')
    attention, x = filled(WindowAttention(DIM, HEADS, sequence, None)), feature_map(3, 5)
    tokens = Attention.forward(attention, x.flatten(1, 2), Grid(3, 5))
    torch.testing.assert_close(attention(x).flatten(1, 2), tokens)
    message = f'attention {sequence!r} goes over the sequence of all tokens, which windows and stripes cut'
    for build in (lambda: WindowAttention(DIM, HEADS, sequence, (3, 5)), lambda: StripeAttention(16, 2, sequence, 3)):
        with pytest.raises(ValueError) as error:
            build()
        assert str(error.value) == message


@pytest.mark.parametrize('size', [(7, 9), (3, 8), (8, 3), (6, 6)], ids=str)
def test_linear_attention_in_shifted_windows_is_that_of_their_real_tokens(size):
    """Also where one axis shifts alone, as of a map of one row of windows."""
    attention, x = filled(WindowAttention(DIM, HEADS, 'rala', (3, 3), shift=True)), feature_map(*size, batch=1)
    out, cut = attention(x).flatten(0, 2), windows.Windows.fit(*size, (3, 3), True)
    assert cut.shift == tuple(1 if side > 3 else 0 for side in size)
    for places in cut.partition(torch.arange(1, 1 + size[0] * size[1]).reshape(1, *size, 1))[..., 0]:
        real = places[places > 0] - 1
        alone = Attention.forward(attention, x.flatten(1, 2)[:, real], Grid(1, len(real)))
        torch.testing.assert_close(out[real], alone[0])


@pytest.mark.parametrize('shift', [False, True], ids=['', 'shifted'])
def test_windows_of_an_item_do_not_see_those_of_another(shift):
    attention = filled(WindowAttention(DIM, HEADS, 'softmax', (4, 4), shift=shift, relative_bias=True))
    x = feature_map(7, 9, batch=3)
    together = attention(x)
    for i in range(3):
        torch.testing.assert_close(attention(x[i : i + 1]), together[i : i + 1])


# --- stripes -----------------------------------------------------------------------------------


@pytest.mark.parametrize('mixer', MIXERS)
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_stripes_are_two_halves_of_windows(mixer, size):
    """Half of the channels in vertical, half in horizontal stripes of width 2, each the size of what there is."""
    attention, x = filled(StripeAttention(DIM, HEADS, mixer, 2)), feature_map(*size)
    out = attention(x, context_tokens=x)
    parts = [part.chunk(2, dim=-1) for part in attention.qkv(x).split([2 * w for w in attention.widths], dim=-1)]
    halves = []
    for i, (rows, columns) in enumerate(((size[0], 2), (2, size[1]))):
        half = torch.empty_like(parts[2][i])
        for y, x0 in itertools.product(range(0, size[0], rows), range(0, size[1], columns)):
            where = (slice(None), slice(y, y + rows), slice(x0, x0 + columns))
            crops = [part[i][where] for part in parts]
            grid = Grid(*crops[0].shape[1:3])
            q, k, v, *gate = (crop.flatten(1, 2) for crop in crops)
            source = x.chunk(2, dim=-1)[i][where].flatten(1, 2)
            mixed = attention.branches[i].mix(q, k, v, grid, context=source.mean(dim=1))
            half[where] = (mixed * gate[0] if gate else mixed).unflatten(1, grid[:2])
        halves.append(half)
    torch.testing.assert_close(out, attention.proj(torch.cat(halves, dim=-1)))


@pytest.mark.parametrize('mixer', MIXERS)
def test_what_the_padding_of_a_stripe_holds_has_no_influence(mixer, poisoned):
    attention, x = filled(StripeAttention(DIM, HEADS, mixer, 4)), feature_map(7, 9)
    expected = attention(x, context_tokens=x)
    for value in (5.0, -300.0):
        poisoned(value)
        torch.testing.assert_close(attention(x, context_tokens=x), expected)


def test_stripes_need_an_even_number_of_heads():
    with pytest.raises(ValueError, match='num_heads=3 has to be even'):
        StripeAttention(24, 3, 'softmax', 2)


def test_gates_of_stripes():
    """Projections alone: the halves of an input of another width than the values' are no gate."""
    mixer = dict(type='rala', output_gate='tanh')
    with pytest.raises(ValueError) as error:
        StripeAttention(DIM, HEADS, mixer, 2)
    assert str(error.value) == f"gate='tanh' of {mixer!r} is not available in stripes"
    assert StripeAttention(DIM, HEADS, 'rala', 2).qkv.out_features == 4 * DIM
    assert StripeAttention(DIM, HEADS, dict(type='rala', output_gate=None), 2).qkv.out_features == 3 * DIM


def test_what_stripes_tell_their_block_and_add_by_default():
    mixers = 'softmax', 'inline', dict(type='inline', local_residual=False)
    assert [StripeAttention(DIM, HEADS, mixer, 2).wants_input for mixer in mixers] == [False, True, False]
    local = [branch.local for branch in StripeAttention(DIM, HEADS, 'softmax', 2).branches]
    assert [(conv.weight.shape, conv.padding) for conv in local] == [((DIM // 2, 1, 3, 3), (1, 1))] * 2
    without = StripeAttention(DIM, HEADS, 'softmax', 2, local_kernel=None)
    assert [branch.local for branch in without.branches] == [None, None]


def cubic(t, a=-0.75):
    """Keys' cubic convolution kernel as PyTorch has it."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


@pytest.mark.parametrize('source, window', [(3, 5), (6, 3), (4, 4)])
def test_bias_tables_of_another_window_are_resized_bicubically(source, window):
    """Swin's fine-tuning at 384; spelled out: pixel centres at i + 1/2, borders repeated."""
    bias = RelativePositionBias((window, window), 2).double()
    n, m = 2 * source - 1, 2 * window - 1
    table = torch.randn(n * n, 2, dtype=torch.float64)
    rows = torch.zeros(m, n, dtype=torch.float64)
    for i in range(m):
        position = (i + 0.5) * n / m - 0.5
        for j in range(math.floor(position) - 1, math.floor(position) + 3):
            rows[i, min(max(j, 0), n - 1)] += cubic(position - j)
    expected = torch.einsum('ai,bj,ijh->abh', rows, rows, table.unflatten(0, (n, n))).flatten(0, 1)
    torch.testing.assert_close(bias.fit(table), expected, rtol=1e-4, atol=1e-5)  # in float32


def test_bias_tables_of_windows_that_are_no_square():
    """The rows of the table go over the columns of a window first; types stay as they were."""
    bias = RelativePositionBias((2, 3), 1)
    assert bias.table.shape == (3 * 5, 1)
    ramp = torch.arange(9.0).view(3, 3).flatten()[:, None]  # three times the row and the column
    for dtype in (torch.float32, torch.float16):
        fitted = bias.fit(ramp.to(dtype))
        assert fitted.shape == (15, 1) and fitted.dtype == dtype
        image = fitted.float().view(3, 5)
        torch.testing.assert_close(image[1:] - image[:-1], torch.full((2, 5), 3.0), rtol=0, atol=0.01)
        assert (image[:, 1:] > image[:, :-1]).all() and abs(image[1, 2] - 4) < 0.01


def test_how_many_tokens_a_window_with_a_bias_may_have():
    """8192, whatever its sides."""
    with torch.device('meta'):
        assert RelativePositionBias((64, 128), 1).table.shape == (127 * 255, 1)
    with pytest.raises(ValueError) as error:
        RelativePositionBias([1, 8193], 1)
    assert str(error.value) == (
        'window_size=(1, 8193): a window with relative position bias may have 8192 tokens at most (90 x 90), not 8193; '
        'a linear attention takes larger ones'
    )


@pytest.mark.parametrize('shape', [(), (9,), (10,), (3, 3, 2), (9, 1, 2), (10, 2), (0, 2)], ids=str)
def test_bias_tables_of_another_form_stay(shape):
    """What they are is for the report of the loading to say."""
    table = torch.randn(shape)
    assert RelativePositionBias((4, 4), 2).fit(table) is table


def test_positions_of_open_windows_are_on_the_device_of_the_map():
    axis, x = Axis(7, 2, shift=True), torch.empty(1, 7, 7, 3, device='meta')
    assert axis.positions(x).shape == (4, 2)
    assert axis.positions(x).device == axis.region(x).device == x.device
