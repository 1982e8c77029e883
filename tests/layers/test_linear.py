# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Products of linear layers. Layers that somebody changed or watches: tests/backbones/test_pairs.py."""

import pytest
import torch
from torch import nn

from mmlinattn.attention.base import split_parts
from mmlinattn.layers import ConvStem, apply_linear
from mmlinattn.layers.linear import project
from mmlinattn.ops import dispatch

pytestmark = pytest.mark.usefixtures('fast_forms')


def test_products_under_autocast_are_of_its_type():
    """Also where a faster product in float32 is at hand, which `torch.autocast` was asked to leave."""
    layer, x = nn.Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert apply_linear(layer, x).dtype == layer(x).dtype == torch.bfloat16
        assert apply_linear(layer, x, gelu=True).dtype == torch.bfloat16
        assert stem(image).dtype == torch.bfloat16


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('reduced', [False, True])
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('backend', ['reference', 'eager', 'cpu'])
def test_projections_of_every_backend(backend, bias, reduced, gated, monkeypatch):
    """GPUs get ``eager``: no other test on a CPU does. Rows of the weight: queries, keys, values, gate."""
    monkeypatch.setattr(dispatch, 'backend', lambda *tensors: backend)
    widths = (3, 4, 5, 6)[: 3 + gated]
    layer, x = nn.Linear(7, sum(widths), bias=bias), torch.randn(2, 6, 7)
    kv = torch.randn(2, 4, 7) if reduced else None
    sources = (x, kv, kv, x) if reduced else (x,) * 4
    rows = ((0, 3), (3, 7), (7, 12), (12, 18))
    expected = [
        source @ layer.weight[a:b].T + (layer.bias[a:b] if bias else 0)
        for source, (a, b) in zip(sources, rows[: len(widths)])
    ]
    for learns in (True, False):
        for convolves in (True, False):
            for module in (layer, nn.Sequential(layer)):
                with torch.set_grad_enabled(learns):
                    found = split_parts(project(module, x, widths, kv, convolves))
                torch.testing.assert_close(found, expected)
                with torch.set_grad_enabled(learns), torch.autocast('cpu', torch.bfloat16):
                    found = split_parts(project(module, x, widths, kv, convolves))
                for part, exact in zip(found, expected):
                    torch.testing.assert_close(part, exact.bfloat16(), rtol=0.05, atol=0.05)
