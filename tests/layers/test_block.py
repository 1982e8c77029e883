# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The residual branches of a block: layer scale and stochastic depth in all their forms."""

import pytest
import torch
from torch import nn

from mmlinattn.layers import Block
from mmlinattn.ops import apply_linear

LN = dict(type='LN', eps=1e-6)


class Branch(nn.Module):
    """Stands for an attention or a feed-forward network."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, out_scale=None):
        return apply_linear(self.linear, x, out_scale)


def block(layer_scale, drop_path=0.0):
    model = Block(4, Branch(), Branch(), LN, drop_path, layer_scale)
    if layer_scale is not None:
        for gamma in (model.gamma1, model.gamma2):
            nn.init.normal_(gamma)
    return model


def equation(model, x):
    for norm, branch, gamma in (
        (model.norm1, model.attn, model.gamma1),
        (model.norm2, model.ffn, model.gamma2),
    ):
        out = branch.linear(norm(x))
        x = x + (out if gamma is None else gamma * out)
    return x


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
@pytest.mark.parametrize('layer_scale', [None, 1.0])
@pytest.mark.parametrize('shape', [(2, 3, 5, 4), (2, 7, 4)], ids=['map', 'tokens'])
def test_a_block_is_its_equation(layer_scale, training, shape):
    model = block(layer_scale).double().train(training)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours, expected = model(x), equation(model, x)
    torch.testing.assert_close(ours, expected)
    leaves = [x, *model.parameters()]
    probe = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(out, leaves, probe) for out in (ours, expected))):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=['', 'half'])
@pytest.mark.parametrize('layer_scale', [None, 1.0])
def test_stochastic_depth_drops_whole_items_and_keeps_the_mean(layer_scale, dtype):
    model = block(layer_scale, drop_path=0.25).to(dtype).train()
    nn.init.zeros_(model.ffn.linear.weight)
    nn.init.zeros_(model.ffn.linear.bias)
    x = torch.randn(1, 3, 4).to(dtype).expand(4000, -1, -1)
    out = model(x) - x
    dropped = (out == 0).flatten(1).all(dim=1)
    assert 0.2 < dropped.float().mean() < 0.3
    kept = out[~dropped]
    assert torch.equal(kept, kept[:1].expand_as(kept))
    whole = equation(model, x[:1]) - x[:1]
    tolerance = 1e-9 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(kept[:1] * 0.75, whole, rtol=tolerance, atol=tolerance)


def test_small_layer_scales_train_under_float16():
    """1e-6 times a weight is no number of float16: there, the scale stays outside the matrix."""
    model = block(1e-6).train()
    for gamma in (model.gamma1, model.gamma2):
        nn.init.constant_(gamma, 1e-6)
    x = torch.randn(2, 3, 4)
    with torch.autocast('cpu', torch.float16):
        out = model(x)
    (out - x).sum().backward()
    exact = model.attn.linear(model.norm1(x)).sum(dim=(0, 1))
    torch.testing.assert_close(model.gamma1.grad, exact, rtol=0.05, atol=0.05)


def test_an_adapter_in_place_of_a_linear_layer_is_called():
    """Low-rank adapters replace modules; the scale acts on what they return."""

    class Adapter(nn.Module):
        def forward(self, x):
            return x + 1

    x, scale = torch.randn(2, 4), torch.randn(4)
    torch.testing.assert_close(apply_linear(Adapter(), x, scale), (x + 1) * scale)
