# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Captured tokens and features of every arrangement, and removal of hooks."""

import pytest
import torch
from torch import nn

from mmlinattn.attention import (
    Attention,
    GlobalAttention,
    Grid,
    ReducedAttention,
    StageContext,
    StripeAttention,
    TokenMixer,
    WindowAttention,
)
from mmlinattn.tooling.analysis.capture import watched


def capture_block(attention, x):
    """Return the block of one attention with new random weights, and the output of the attention."""
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    found = []
    model = nn.ModuleDict(dict(block=nn.ModuleDict(dict(attn=attention.eval()))))
    with watched(model, found.append):
        out = attention(x, StageContext.of(x))
    (block,) = found
    return block, out


class Doubled(GlobalAttention):
    """Arrangement of a user that changes the mixer's output in place."""

    def mix(self, q, k, v, grid, **_):
        return self.mixer(q, k, v, grid, grid).mul_(2)


ARRANGEMENTS = {
    **{
        f'gate: {gate}': lambda gate=gate: GlobalAttention(8, 2, 'inline', local_kernel=3, gate=gate)
        for gate in (None, 'projection', 'identity', 'tanh')
    },
    'windows, cut at the border': lambda: WindowAttention(8, 2, 'enhanced', (4, 4)),
    'windows, shifted': lambda: WindowAttention(8, 2, 'softmax', (4, 4), shift=True),
    'reduced keys': lambda: ReducedAttention(8, 2, 'softmax', 2, dict(type='LN'), gate='tanh'),
    'stripes': lambda: StripeAttention(8, 2, 'softmax', 2),
    'stripes, gate': lambda: StripeAttention(8, 4, 'rala', 2),
}


@pytest.mark.parametrize('make', ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_features_are_the_input_of_the_output_projection(make):
    attention, x = make(), torch.randn(1, 5, 6, 8)
    block, out = capture_block(attention, x)
    features = block.features()
    assert (block.name, block.size) == ('block', (5, 6)) and len(features) == len(block.branches)
    for branch, (mixed, whole) in zip(block.branches, features):  # the mixer's own, without convolution and gate
        for window in branch:
            valid = window.queries >= 0
            assert torch.equal(mixed.transpose(0, 1).flatten(1)[window.queries[valid]], window.out[valid])
        if not branch[0].convolutions() and not getattr(attention, 'gate', 'gate'):
            torch.testing.assert_close(mixed, whole)
    merged = torch.cat([whole.transpose(0, 1).flatten(1) for _, whole in features], dim=-1)
    torch.testing.assert_close(attention.proj(merged).unflatten(0, (5, 6))[None], out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('make', [*ARRANGEMENTS.values(), lambda: Doubled(8, 2, 'softmax')])
def test_captured_tokens_are_not_overwritten(make):
    attention, given, gave = make(), [], []
    for module in attention.modules():
        if isinstance(module, TokenMixer):
            module.register_forward_pre_hook(lambda mixer, args: given.append([t.clone() for t in args[:3]]))
            module.register_forward_hook(lambda mixer, args, out: gave.append(out.clone()))
    block, _ = capture_block(attention, torch.randn(1, 5, 6, 8))
    tokens = [torch.cat([one for call in given for one in call[i]]) for i in range(3)]
    caught = torch.cat([window.out for window in block.windows])
    assert torch.equal(caught, torch.cat([out.flatten(0, 1) for out in gave]))
    for name, expected in zip('qkv', tokens):
        assert torch.equal(torch.cat([window.inputs[name][0] for window in block.windows]), expected)
    for window in block.windows:
        rows = (window.queries >= 0).nonzero()[:, 0]
        weights = window.weights(rows)
        assert window.error(rows, weights) < 1e-4 < 0.1 < window.error(rows, 2 * weights)


def test_hooks_are_removed_after_an_error():
    model, found = nn.Sequential(GlobalAttention(8, 2, 'softmax')).eval(), []
    images = [torch.randn(*size, 8) for size in ((1, 3, 4), (1, 2, 5), (2, 3, 4))]
    with pytest.raises(ValueError, match='one image at a time, not 2'), watched(model, found.append):
        for image in images:
            assert not model[0](image, StageContext.of(image)).requires_grad
    assert [(block.size, len(block.windows)) for block in found] == [((3, 4), 1), ((2, 5), 1)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Halves(Attention):
    """Arrangement with tokens in an unknown order."""

    def forward(self, x, stage):
        tokens = x.flatten(1, 2).unflatten(1, (2, -1))[0]
        return super().forward(tokens, StageContext(Grid(1, tokens.shape[1]))).flatten(0, 1).view_as(x)


class Strided(WindowAttention):
    """Arrangement with windows of distant tokens, as in MaxViT."""

    def forward(self, x, stage):
        return super().forward(x.flip(1), stage).flip(1)


def test_unsupported_arrangements_are_named():
    for attention in (Strided(8, 2, 'softmax', (2, 2)), Halves(8, 2, 'softmax')):
        with pytest.raises(
            NotImplementedError, match=f'{type(attention).__name__} arranges its tokens in an order unknown'
        ):
            capture_block(attention, torch.randn(1, 4, 4, 8))
    with pytest.raises(ValueError, match='Linear has no attention'), watched(nn.Linear(2, 2), print):
        pass


def test_states_are_of_the_valid_tokens_of_a_window():
    """Exclude padding: 5 rows in stripes of 2 leave one padded row."""
    block, _ = capture_block(
        StripeAttention(8, 2, dict(type='inline', local_residual=False), 2), torch.randn(1, 5, 6, 8)
    )
    last = block.branches[1][-1]
    valid = last.queries >= 0
    assert valid.sum() == 6 and len(valid) == 12
    k, v = last.inputs['k'][0, valid], last.inputs['v'][0, valid]
    expected = (k - k.mean(dim=0)).mT @ v
    state = last.state()[0]
    torch.testing.assert_close(state / state.norm(), expected / expected.norm(), rtol=1e-4, atol=1e-5)
    block, _ = capture_block(GlobalAttention(8, 2, 'softmax'), torch.randn(1, 4, 5, 8))
    assert block.windows[0].state() is None
