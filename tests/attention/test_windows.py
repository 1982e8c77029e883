# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Cutting maps into windows and putting them together again, pixel by pixel."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmlinattn.attention import Windows
from mmlinattn.ops.windows import Axis

sizes = st.integers(1, 9)


@settings(deadline=None, derandomize=True, max_examples=40)
@example(13, 16, (4, 4), True)
@example(5, 7, (3, 5), True)
@example(8, 8, (4, 4), True)
@example(9, 1, (2, 7), True)
@example(4, 6, None, True)
@given(sizes, sizes, st.none() | st.tuples(sizes, sizes), st.booleans())
def test_every_pixel_lands_where_rolling_and_cutting_put_it(height, width, window, shift):
    """Also the mask of real tokens, and all back in their places. Where nothing pads and no region is cut, there is
    neither mask nor pairs."""
    windows = Windows.fit(height, width, window, shift)
    x = torch.arange(2 * height * width).view(2, height, width, 1) + 1
    cut, real, regions = windows.partition(x), windows.real(x), windows.regions_of_tokens(x)
    assert torch.equal(windows.merge(cut, 2), x) and torch.equal(windows.merge(cut), x)
    (rows, columns), (high, wide) = windows.counts, windows.window
    assert windows.grid(x).num_tokens == high * wide
    assert (real is None) == (windows.padded == (height, width))
    assert (regions is None) == (not any(windows.shift))
    y, across = torch.cartesian_prod(torch.arange(height), torch.arange(width)).T
    row, column = ((at - shift) % side for at, shift, side in zip((y, across), windows.shift, windows.padded))
    expected = torch.zeros(2, rows * columns, high * wide, 1, dtype=x.dtype)
    expected[:, row // high * columns + column // wide, row % high * wide + column % wide] = x[:, y, across]
    assert torch.equal(cut, expected.flatten(0, 1))
    assert real is None or torch.equal(real, expected.flatten(0, 1)[..., 0] > 0)
    if regions is not None:  # what they are of: test_arrangements.py
        assert regions.shape == (rows * columns, high * wide) and 0 <= regions.min() <= regions.max() < 4


def test_windows_are_clipped_to_the_map():
    assert Windows.fit(5, 9, (7, 7), True) == Windows(5, 9, (5, 7), (0, 3))
    assert Windows.fit(7, 7, (7, 7), True) == Windows(7, 7, (7, 7), (0, 0))
    assert Windows.fit(5, 9, None, True) == Windows(5, 9, (5, 9), (0, 0))
    x, windows = torch.randn(2, 5, 9, 3), Windows.fit(5, 9, (56, 56))
    assert windows.is_whole  # one window is the map without a copy
    assert windows.partition(x).data_ptr() == windows.merge(windows.partition(x)).data_ptr() == x.data_ptr()


def test_positions_of_open_windows_are_on_the_device_of_the_map():
    axis, x = Axis(7, 2, shift=True), torch.empty(1, 7, 7, 3, device='meta')
    assert axis.positions(x).shape == (4, 2)
    assert axis.positions(x).device == axis.region(x).device == x.device
