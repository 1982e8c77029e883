# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Layers that somebody changed or watches are called; what hooks have seen is never written over."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from mmlinattn.attention import TOKEN_MIXERS, Attention, Grid, TokenMixer
from mmlinattn.layers import MLP, Block, ConvStem, apply_linear
from mmlinattn.layers.linear import project, split_parts
from mmlinattn.ops import dispatch

pytestmark = pytest.mark.usefixtures('fast_forms')
DIM, HEADS, GRID = 16, 2, Grid(3, 4)


def build(mixer, dtype=torch.float64, **options):
    attention = Attention(DIM, HEADS, mixer, local_kernel=5, **options).to(dtype)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def tokens(dtype=torch.float64, batch=2):
    return torch.randn(batch, GRID.num_tokens, DIM, dtype=dtype)


@pytest.mark.parametrize('reduced', [False, True], ids=['', 'reduced keys'])
@pytest.mark.parametrize('change', [weight_norm, parametrizations.weight_norm, 'prune', 'forward'])
def test_changed_weights_train(change, reduced):
    """Two steps: what is taken out of the layer has to be made anew for the second."""
    attention, x = build('softmax'), tokens()
    attention.local = None
    if change == 'prune':
        prune.l1_unstructured(attention.qkv, 'weight', amount=0.5)
    elif change == 'forward':
        original = attention.qkv.forward
        attention.qkv.forward = lambda x: 2 * original(x)
    else:
        change(attention.qkv)
    options = dict(kv=x[:, ::2], key_grid=Grid(2, 3)) if reduced else {}
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    outs = []
    for _ in range(2):
        optimizer.zero_grad()
        out = attention(x, GRID, **options)
        out.square().mean().backward()
        optimizer.step()
        outs.append(out.detach())
    assert (outs[0] - outs[1]).abs().max() > 1e-6


@pytest.mark.parametrize('gate', ['identity', 'projection', None])
def test_a_mixer_may_return_a_view_of_shared_memory(gate):
    @TOKEN_MIXERS.register_module('expanded mean', force=True)
    class Mean(TokenMixer):
        def forward(self, q, k, v, grid, key_grid, **_):
            return v.mean(dim=1, keepdim=True).expand_as(v)

    try:
        attention, x = build('expanded mean', gate=gate), tokens()
        for local in (attention.local, None):
            attention.local = local
            expected = attention(x, GRID)
            with torch.no_grad():
                torch.testing.assert_close(attention(x, GRID), expected)
    finally:
        TOKEN_MIXERS._module_dict.pop('expanded mean')


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('scale', [True, False])
def test_a_scale_goes_into_the_matrix(scale, bias):
    layer, x, factor = nn.Linear(6, 4, bias=bias), torch.randn(2, 3, 6), torch.randn(4) if scale else None
    expected = nn.functional.linear(x, layer.weight, layer.bias) * (factor if scale else 1)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(apply_linear(layer, x, factor), expected)
            torch.testing.assert_close(apply_linear(nn.Sequential(layer), x, factor), expected)


def test_products_under_autocast_are_of_its_type():
    """Also where a faster product in float32 is at hand, which `torch.autocast` was asked to leave."""
    layer, x = nn.Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert apply_linear(layer, x).dtype == layer(x).dtype == torch.bfloat16
        assert apply_linear(layer, x, gelu=True).dtype == torch.bfloat16
        assert stem(image).dtype == torch.bfloat16


def test_a_layer_scale_that_half_precision_cannot_hold_is_applied_after_the_product():
    """1e-9 in a matrix of float16 is 0."""
    block = Block(4, nn.Identity(), MLP(4, 8), dict(type='LN'), layer_scale=1e-9).eval()
    x = torch.zeros(1, 2, 2, 4)
    nn.init.ones_(block.ffn.fc2.bias), nn.init.zeros_(block.gamma1)
    with torch.no_grad(), torch.autocast('cpu', torch.float16):
        out = block(x)
    assert (out > 5e-10).all()


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
