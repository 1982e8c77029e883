# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch

from mmlinattn.layers import MLP, ConvFFN, DWConvFFN


@pytest.mark.parametrize('ffn', [MLP, ConvFFN, DWConvFFN])
@pytest.mark.parametrize('height', [20, 17, 41])
@pytest.mark.parametrize('scaled', [True, False])
def test_strips_change_nothing(ffn, height, scaled, monkeypatch):
    module = ffn(4, 10).double()
    x = torch.randn(2, height, 3, 4, dtype=torch.float64)
    scale = torch.rand(4, dtype=torch.float64) if scaled else None
    whole = module(x, scale)
    calls = []
    hidden = module.hidden
    monkeypatch.setattr(module, 'hidden', lambda x: calls.append(x.shape[1]) or hidden(x))
    monkeypatch.setattr(MLP, 'strip_numel', 3 * 10 * 8)
    with torch.no_grad():
        torch.testing.assert_close(module(x, scale), whole)
    assert len(calls) == 2 * -(-height // 8) and max(calls) <= 8 + 2 * ffn.halo


def test_strips_of_tokens(monkeypatch):
    module, x = MLP(4, 10), torch.randn(3, 50, 4)
    whole = module(x)
    monkeypatch.setattr(MLP, 'strip_numel', 70)
    with torch.no_grad():
        torch.testing.assert_close(module(x), whole)
