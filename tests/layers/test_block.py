# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Residual branches of a block: layer scale and stochastic depth. Feed-forward networks:
tests/backbones/test_backbones_parity.py."""

import pytest
import torch
from torch import nn

from mmlinattn.attention import Grid, ReducedAttention, StageContext
from mmlinattn.layers import MLP, Block, ConvFFN, PatchEmbed, PatchMerging, TokenBlock

LN = dict(type='LN', eps=1e-6)


class Branch(nn.Linear):
    def forward(self, x, *context):
        return super().forward(x)


def block(layer_scale, drop_path=0.0):
    model = Block(4, Branch(4, 4), Branch(4, 4), LN, drop_path, layer_scale)
    if layer_scale is not None:
        for gamma in (model.gamma1, model.gamma2):
            nn.init.normal_(gamma)
    return model


@pytest.mark.parametrize('layer_scale', [None, 0.5, 0.0])
@pytest.mark.parametrize('prefix', [0, 1, 2])
def test_feed_forward_networks_of_maps_take_tokens(prefix, layer_scale):
    context = StageContext(Grid(2, 3, prefix=prefix))
    model = TokenBlock(4, nn.Identity(), ConvFFN(4, 8), LN, layer_scale=layer_scale)
    model.attn.forward = lambda x, context: torch.zeros_like(x)
    x = torch.randn(2, context.grid.num_tokens, 4)
    hidden = model.norm2(x)
    patches = model.ffn(hidden[:, prefix:].unflatten(1, (2, 3))).flatten(1, 2)
    alone = [model.ffn(hidden[:, i, None, None])[:, 0] for i in range(prefix)]
    expected = torch.cat((*alone, patches), dim=1)
    torch.testing.assert_close(model(x, context), x + expected * (1 if layer_scale is None else layer_scale))


@pytest.mark.parametrize('form', ['float64', 'bfloat16', 'autocast'])
@pytest.mark.parametrize('layer_scale', [None, 1.0])
def test_stochastic_depth_drops_whole_items_and_keeps_the_mean(layer_scale, form):
    """Under autocast, branches are in half precision and the residual stream in float32."""
    dtype = torch.float32 if form == 'autocast' else getattr(torch, form)
    model = block(layer_scale, drop_path=0.25).to(dtype).train()
    nn.init.zeros_(model.ffn.weight), nn.init.zeros_(model.ffn.bias)
    x = torch.randn(1, 3, 4).to(dtype).expand(4000, -1, -1)
    with torch.autocast('cpu', torch.bfloat16, enabled=form == 'autocast'):
        out = model(x, None) - x
    assert out.dtype == dtype
    dropped = (out == 0).flatten(1).all(dim=1)
    assert 0.2 < dropped.float().mean() < 0.3
    kept = out[~dropped]
    assert torch.equal(kept, kept[:1].expand_as(kept))
    whole = model.attn(model.norm1(x[:1])) * (1 if layer_scale is None else model.gamma1)  # the other branch is zero
    tolerance = 1e-9 if form == 'float64' else 0.1
    torch.testing.assert_close(kept[:1] * 0.75, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('learns', [True, False])
def test_small_layer_scales_under_float16(learns):
    """Scale outside the matrix by 1e-9, which float16 cannot represent times a weight."""
    model, x = Block(4, Branch(4, 4), MLP(4, 8), LN, layer_scale=1e-9), torch.zeros(2, 3, 4)
    nn.init.zeros_(model.gamma1), nn.init.ones_(model.ffn.fc2.bias)
    with torch.autocast('cpu', torch.float16), torch.set_grad_enabled(learns):
        out = model(x, None)
    exact = model.ffn(model.norm2(x))
    torch.testing.assert_close(out, 1e-9 * exact, rtol=0.01, atol=0)
    if learns:
        out.sum().backward()
        torch.testing.assert_close(model.gamma2.grad, exact.sum(dim=(0, 1)), rtol=0.01, atol=0.01)


@pytest.mark.parametrize('norm', ['BN1d', 'IN', 'GN', 'SyncBN'])
@pytest.mark.parametrize(
    'build',
    [
        lambda cfg: Block(4, Branch(4, 4), Branch(4, 4), cfg),
        lambda cfg: PatchEmbed(3, 4, 2, 2, norm_cfg=cfg),
        lambda cfg: PatchMerging(4, 8, cfg),
        lambda cfg: ReducedAttention(4, 2, 'softmax', 2, cfg),
    ],
)
def test_norms_that_would_take_rows_for_channels_are_refused(build, norm):
    with pytest.raises(ValueError, match=f"^norm_cfg=.*'{norm}'.*: expected a norm over the last axis, as 'LN'"):
        build(dict(type=norm, **(dict(num_groups=2) if norm == 'GN' else {})))


def test_hooks_of_a_norm_see_tokens():
    """Pass (B, N, C) to norms: activation viewers take four dimensions for (B, C, H, W)."""
    model, seen = block(None), []
    for norm in (model.norm1, model.norm2):
        norm.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    model(torch.randn(2, 3, 5, 4), None)
    assert seen == [(2, 15, 4)] * 2
