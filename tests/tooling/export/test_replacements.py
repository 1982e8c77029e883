# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Replaced modules, and linear layers of ONNX graphs."""

from collections import Counter

import pytest
import torch
from torch import nn

from mmlinattn.layers.block import ConvFFN, DWConvFFN, ResidualDWConv
from mmlinattn.tooling.export import FORMATS
from mmlinattn.tooling.export.replacements import BinMeans, as_convolutions


@pytest.mark.parametrize('bins', [(1, 1), (2, 2), (3, 3), (6, 6), (2, 5)], ids=str)
@pytest.mark.parametrize('size', [(1, 1), (4, 7), (13, 6), (32, 32)], ids=str)
def test_bin_means_are_adaptive_pools(bins, size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(BinMeans(bins)(x), nn.AdaptiveAvgPool2d(bins)(x))


@pytest.mark.parametrize('kind', [ConvFFN, DWConvFFN, ResidualDWConv])
def test_depth_wise_convolutions_in_feed_forward_networks(kind):
    """Replace layers by equal convolutions, and keep changed layers."""
    module = (kind(8) if kind is ResidualDWConv else kind(8, 24)).eval()
    x = torch.randn(2, 5, 6, 8)
    new = as_convolutions(module)
    assert not any(isinstance(each, nn.Linear) for each in new.modules())
    torch.testing.assert_close(new(x), module(x), rtol=1e-4, atol=1e-5)
    inner = module if kind is ResidualDWConv else module.fc1
    inner.register_forward_hook(lambda *_: None)
    assert as_convolutions(module) is None


class Tokens(nn.Module):
    """Linear layers whose results are split: with a bias, without one, along another axis, and used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(12, 9), nn.Linear(12, 9, bias=False), nn.Linear(12, 9), nn.Linear(12, 9)]
        )

    def forward(self, x):
        first, bare, rows, twice = (layer(x.flatten(2).transpose(1, 2)) for layer in self.layers)
        return *first.split((2, 3, 4), -1), *bare.split((4, 5), -1), *rows.split(8, 1), *twice.split((4, 5), -1), twice


@pytest.mark.parametrize('dynamo', [True, False])
def test_split_products(dynamo, tmp_path):
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    model, image, path = Tokens().eval(), torch.randn(2, 12, 4, 4), tmp_path / 'tokens.onnx'
    names = ['scores' if dynamo else 'boxes', *(f'out{i}' for i in range(1, 10))]  # graphs with boxes are traced
    FORMATS['onnx'].write(model, image, path, None, dict(outputs=names))
    kinds = Counter(node.op_type for node in onnx.load(str(path)).graph.node)
    assert kinds['Split'] == 3 and kinds['MatMul'] == 3 + 1 + 1 + 1
    for out, expected in zip(FORMATS['onnx'].load(path)(image), model(image)):
        torch.testing.assert_close(out, expected)
