# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from torch import nn

from mmlinattn.export.replacements import BinMeans, replace_modules


@pytest.mark.parametrize('bins', [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)], ids=str)
@pytest.mark.parametrize('size', [(1, 1), (4, 7), (13, 6), (32, 32)], ids=str)
def test_bin_means_are_adaptive_pools(bins, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(BinMeans(bins)(x), nn.AdaptiveAvgPool2d(bins)(x))


def test_bin_means_hold_at_sizes_other_than_the_traced_one():
    graph = torch.jit.trace(BinMeans((3, 2)), torch.randn(1, 2, 8, 9))
    x = torch.randn(2, 2, 13, 4)
    torch.testing.assert_close(graph(x), nn.AdaptiveAvgPool2d((3, 2))(x))


def test_only_pools_of_several_bins_are_replaced():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.AdaptiveAvgPool2d((2, 3))), nn.AvgPool2d(2))
    replace_modules(model)
    kinds = [type(module) for module in (model[0], model[1][0], model[2])]
    assert kinds == [nn.AdaptiveAvgPool2d, BinMeans, nn.AvgPool2d]
