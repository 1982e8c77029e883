# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Linear layers of ONNX graphs."""

from collections import Counter

import pytest
import torch
from torch import nn

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mmlinattn.tooling.export import FORMATS  # noqa: E402


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
    torch.manual_seed(0)
    model, image, path = Tokens().eval(), torch.randn(2, 12, 4, 4), tmp_path / 'tokens.onnx'
    names = ['scores' if dynamo else 'boxes', *(f'out{i}' for i in range(1, 10))]  # graphs with boxes are traced
    FORMATS['onnx'].write(model, image, path, None, dict(outputs=names))
    kinds = Counter(node.op_type for node in onnx.load(str(path)).graph.node)
    assert kinds['Split'] == 3 and kinds['MatMul'] == 3 + 1 + 1 + 1
    for out, expected in zip(FORMATS['onnx'].load(path)(image), model(image)):
        torch.testing.assert_close(out, expected)
