# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Cutting maps into windows and putting them together again."""

import itertools

import pytest
import torch

from mmlinattn.attention import Windows
from mmlinattn.ops.sizes import as_tensor

SIZES = [(4, 6), (5, 7), (1, 9), (9, 1), (8, 8), (3, 3), (13, 16), (1, 1)]
WINDOWS = [None, (4, 4), (3, 5), (1, 1), (2, 7), (20, 20), (7, 1)]
CUTS = [Windows.fit(*size, window, shift) for size, window, shift in itertools.product(SIZES, WINDOWS, (False, True))]


def ids(windows):
    return f'{windows.height}x{windows.width} by {windows.window} {windows.shift}'


def place(windows, y, x):
    """Window and place within it of the pixel (y, x) of the padded map: (window row, window column, row, column)."""
    y = (y - windows.shift[0]) % windows.padded[0]
    x = (x - windows.shift[1]) % windows.padded[1]
    return y // windows.window[0], x // windows.window[1], y % windows.window[0], x % windows.window[1]


def index(windows, y, x):
    """(window, token) of the pixel."""
    row, column, i, j = place(windows, y, x)
    return row * windows.counts[1] + column, i * windows.window[1] + j


def pixels(windows):
    return itertools.product(*map(range, windows.padded))


@pytest.mark.parametrize('windows', CUTS, ids=ids)
def test_merge_undoes_partition(windows):
    x = torch.randn(2, windows.height, windows.width, 3)
    cut = windows.partition(x)
    rows, columns = windows.counts
    assert cut.shape == (2 * rows * columns, windows.window[0] * windows.window[1], 3)
    assert torch.equal(windows.merge(cut), x)


@pytest.mark.parametrize('windows', CUTS, ids=ids)
def test_every_pixel_lands_where_rolling_and_cutting_put_it(windows):
    x = torch.arange(2 * windows.height * windows.width).view(2, windows.height, windows.width, 1) + 1
    cut = windows.partition(x)[..., 0].unflatten(0, (2, -1))
    for y, column in pixels(windows):
        real = y < windows.height and column < windows.width
        expected = x[:, y, column, 0] if real else torch.zeros(2, dtype=torch.long)
        assert torch.equal(cut[(slice(None), *index(windows, y, column))], expected)


@pytest.mark.parametrize('windows', CUTS, ids=ids)
def test_the_mask_names_the_real_tokens(windows):
    real = windows.real(torch.empty(2, windows.height, windows.width, 1))
    if windows.padded == (windows.height, windows.width):
        assert real is None
        return
    real = real.unflatten(0, (2, -1))
    for y, x in pixels(windows):
        assert bool(real[0][index(windows, y, x)]) == (y < windows.height and x < windows.width)
    assert torch.equal(real[0], real[1])
    assert real.any(dim=2).all()  # no window of padding only is ever cut


@pytest.mark.parametrize('windows', CUTS, ids=ids)
def test_tokens_that_the_roll_brought_together_are_kept_apart(windows):
    """Two tokens of a window are neighbours where their offset is the one they had in the map."""
    same = windows.same_region(torch.empty(1, windows.height, windows.width, 1))
    if not any(windows.shift):
        assert same is None
        return
    where = {index(windows, y, x): (y, x) for y, x in pixels(windows)}
    tokens = windows.window[0] * windows.window[1]
    assert same.shape == (windows.counts[0] * windows.counts[1], tokens, tokens)
    for window, i, j in itertools.product(range(len(same)), range(tokens), range(tokens)):
        first, second = where[window, i], where[window, j]
        offsets = [a - b for a, b in zip(first, second)]
        places = [a - b for a, b in zip(place(windows, *first)[2:], place(windows, *second)[2:])]
        assert bool(same[window, i, j]) == (offsets == places)


def test_windows_are_clipped_to_the_map():
    assert Windows.fit(5, 9, (7, 7), True) == Windows(5, 9, (5, 7), (0, 3))
    assert Windows.fit(7, 7, (7, 7), True) == Windows(7, 7, (7, 7), (0, 0))
    assert Windows.fit(5, 9, None, True) == Windows(5, 9, (5, 9), (0, 0))


def test_one_window_is_the_map_without_a_copy():
    x = torch.randn(2, 5, 9, 3)
    windows = Windows.fit(5, 9, (56, 56))
    assert windows.is_whole
    assert windows.partition(x).data_ptr() == windows.merge(windows.partition(x)).data_ptr() == x.data_ptr()


@pytest.mark.parametrize('size', [7, torch.tensor(7)])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.int64])
def test_a_size_is_a_tensor_of_the_type_asked_for(size, dtype):
    found = as_tensor(size, torch.empty(2, 2), dtype)
    assert found.dtype == dtype and found.shape == () and found == 7
