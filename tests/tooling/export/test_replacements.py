# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from torch import nn

from mmlinattn.tooling.export.replacements import BinMeans


@pytest.mark.parametrize('bins', [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)], ids=str)
@pytest.mark.parametrize('size', [(1, 1), (4, 7), (13, 6), (32, 32)], ids=str)
def test_bin_means_are_adaptive_pools(bins, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(BinMeans(bins)(x), nn.AdaptiveAvgPool2d(bins)(x))
