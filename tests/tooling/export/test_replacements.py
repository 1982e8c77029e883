# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from torch import nn

from mmlinattn.layers.block import ConvFFN, DWConvFFN, ResidualDWConv
from mmlinattn.tooling.export.replacements import BinMeans, as_convolutions


@pytest.mark.parametrize('bins', [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)], ids=str)
@pytest.mark.parametrize('size', [(1, 1), (4, 7), (13, 6), (32, 32)], ids=str)
def test_bin_means_are_adaptive_pools(bins, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(BinMeans(bins)(x), nn.AdaptiveAvgPool2d(bins)(x))


@pytest.mark.parametrize('kind', [ConvFFN, DWConvFFN, ResidualDWConv])
def test_depth_wise_convolutions_in_feed_forward_networks(kind):
    """Replace layers by equal convolutions, and keep changed layers."""
    torch.manual_seed(0)
    module = (kind(8) if kind is ResidualDWConv else kind(8, 24)).eval()
    x = torch.randn(2, 5, 6, 8)
    new = as_convolutions(module)
    assert not any(isinstance(each, nn.Linear) for each in new.modules())
    torch.testing.assert_close(new(x), module(x), rtol=1e-4, atol=1e-5)
    inner = module if kind is ResidualDWConv else module.fc1
    inner.register_forward_hook(lambda *_: None)
    assert as_convolutions(module) is None
