# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Cutting maps into windows and putting them together again, pixel by pixel."""

import torch

from mmlinattn.attention import Windows
from mmlinattn.attention.windows import Axis


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
