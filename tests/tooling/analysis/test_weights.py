# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``mixer_weights`` and ``mixer_state`` against the outputs of the mixers and their equations."""

import pytest
import torch
from helpers.references import ATTENTIONS, OWN_VALUE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmlinattn.attention import Grid, LocalMixer, TokenMixer, get_mixer
from mmlinattn.layers import rotary_table
from mmlinattn.ops.tokens import merge_heads, on_grid, split_heads
from mmlinattn.tooling.analysis.weights import has_unit_output, local_weights, mixer_state, mixer_weights

DIM, HEADS, GRID = 16, 2, Grid(3, 5)
OPTIONS = {
    # for a power of 32, the epsilon of the normaliser (1e-6) shows in the sums
    **{name: spec for name, spec in ATTENTIONS.items() if name != 'focused, power 32'},
    'focused, p = 4.5': dict(type='focused', power=4.5),
}


def build(options, dtype=torch.float64):
    kind, options = get_mixer(options)
    mixer = kind(DIM, HEADS, grid=(3, 5), **options).to(dtype)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return mixer.eval()


def tokens(mixer, num_queries=15, num_keys=15, mask=None, dtype=torch.float64):
    q, k, v = (
        torch.randn(2, num, width, dtype=dtype) for num, width in zip((num_queries, num_keys, num_keys), mixer.widths)
    )
    return q, k, v if mask is None else v * mask.unsqueeze(-1).to(dtype)


def by_head(mixer, weights, v):
    mixed = weights @ split_heads(v, weights.shape[1]).to(weights.dtype)
    return merge_heads(nn.functional.normalize(mixed, dim=-1) if has_unit_output(mixer) else mixed)


def attend(mixer, q, k, v, mask=None, **terms):
    """Return the mixer's output without the convolution of the values."""
    if isinstance(mixer, LocalMixer):
        return mixer.attend(q, k, v, GRID, mask)
    return mixer(q, k, v, GRID, GRID, mask, **terms)


def terms(mixer, dtype=torch.float64):
    """Return rotary encoding and bias for mixers that take them."""
    found = dict(rotary=rotary_table(3, 5, mixer.head_dim, dtype=dtype)) if mixer.rotary else {}
    return {**found, 'bias': torch.randn(2, mixer.num_heads, 15, 15, dtype=dtype)} if mixer.bias else found


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_weights_times_values_are_the_output(options, dtype, masked):
    mixer, mask = build(options, dtype), None
    if masked:
        mask = torch.rand(2, 15) > 0.4
        mask[:, 0] = True
    q, k, v = tokens(mixer, mask=mask, dtype=dtype)
    shared = dict(mask=mask, **terms(mixer, dtype))
    before, state = (q.clone(), k.clone()), torch.get_rng_state()
    with torch.inference_mode():
        weights = mixer_weights(mixer, q, k, GRID, GRID, **shared)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1]) and torch.equal(torch.get_rng_state(), state)
    assert weights.shape == (2, mixer.num_heads, 15, 15) and not weights.requires_grad
    if masked:
        assert not weights.masked_select(~mask[:, None, None]).any()
    mixed, tolerance = by_head(mixer, weights, v), 1e-10 if dtype == torch.float64 else 1e-5
    for grad in (False, True):  # the attention in training takes another path
        with torch.set_grad_enabled(grad):
            out = attend(mixer, q.clone(), k.clone(), v, **shared)
        assert (mixed - out).norm() <= tolerance * out.norm()
    for rows in ([7, 0, 14, 7], [], torch.tensor([3, 2], dtype=torch.uint8)):  # PyTorch takes bytes for masks
        index = torch.as_tensor(rows, dtype=torch.long)
        torch.testing.assert_close(mixer_weights(mixer, q, k, GRID, GRID, **shared, rows=rows), weights[:, :, index])


@pytest.mark.parametrize('options', [dict(type='focused'), dict(type='rala')], ids=str)
def test_weights_of_half_precision_are_those_of_float32(options):
    half = build(options, torch.bfloat16)
    q, k, _ = tokens(half, dtype=torch.bfloat16)
    shared = terms(half, torch.bfloat16)
    found = mixer_weights(half, q, k, GRID, GRID, **shared)
    wide = mixer_weights(half.float(), q.float(), k.float(), GRID, GRID, **shared)
    torch.testing.assert_close(found, wide)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    prefix=st.integers(0, 2),
    size=st.sampled_from([(1, 1), (3, 3), (5, 5), (9, 1)]),
    heads=st.sampled_from([1, 2, 4]),
)
def test_a_convolution_as_a_matrix(height, width, prefix, size, heads):
    """Average the matrix over the channels of each head, for 2-D kernels and kernels along the sequence."""
    grid, v = Grid(height, width, prefix), torch.randn(2, prefix + height * width, heads, dtype=torch.float64)
    v = v.repeat_interleave(4 // heads, dim=-1)
    conv = nn.Conv2d(4, 4, size, padding=(size[0] // 2, size[1] // 2), groups=4).double()
    along = Grid(grid.num_tokens, 1) if size == (9, 1) else grid

    def convolve(x):
        return on_grid(conv, x, along)

    bias = convolve(torch.zeros_like(v))
    expected = split_heads(convolve(v) - bias, heads).mean(dim=-1)
    matrix = local_weights(convolve, v, heads)
    torch.testing.assert_close((matrix @ split_heads(v, heads)).mean(dim=-1), expected)
    torch.testing.assert_close(local_weights(convolve, v, heads, rows=[grid.num_tokens - 1]), matrix[:, :, -1:])
    assert local_weights(convolve, v, heads, rows=[]).shape == (2, heads, 0, grid.num_tokens)


class Squared(TokenMixer):
    """Mixer of a user that overwrites its queries."""

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        q, k = split_heads(q.square_(), self.num_heads) + 1, split_heads(k, self.num_heads) ** 2
        weights = q @ k.transpose(-1, -2) * (1 if bias is None else bias)
        if mask is not None:
            weights = weights * mask[:, None, None]
        return merge_heads(weights / weights.sum(dim=-1, keepdim=True) @ split_heads(v, self.num_heads))


class WithNeighbours(Squared):
    def forward(self, q, k, v, *args, **kwargs):
        return super().forward(q, k, v, *args, **kwargs) + v.roll(1, 1) * torch.arange(v.shape[-1])


class NotANumber(Squared):
    def forward(self, q, k, v, *args, **kwargs):
        return super().forward(q, k, v, *args, **kwargs) * float('nan')


class OfContext(Squared):
    context = True


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
def test_a_mixer_of_the_user(masked):
    mixer = Squared(DIM, HEADS)
    mask = torch.arange(15).expand(2, 15) < 9 if masked else None
    q, k, v = tokens(mixer, mask=mask)
    shared = dict(mask=mask, bias=torch.rand(1, HEADS, 15, 15))
    weights = mixer_weights(mixer, q, k, GRID, GRID, **shared)
    torch.testing.assert_close(by_head(mixer, weights, v), mixer(q, k, v, GRID, GRID, **shared))


@pytest.mark.parametrize('rows', [[15], [-1], [0.5], [True, False], [[0]]], ids=str)
def test_rows_have_to_be_indices(rows):
    mixer = build(dict(type='efficient'))
    q, k, _ = tokens(mixer)
    with pytest.raises(ValueError, match='expected a sequence of indices of queries in .0, 14.'):
        mixer_weights(mixer, q, k, GRID, GRID, rows=rows)


@pytest.mark.parametrize('kind', [WithNeighbours, NotANumber, OfContext])
def test_mixers_without_an_attention_map(kind):
    mixer = kind(DIM, HEADS)
    q, k, _ = tokens(mixer)
    with pytest.raises(NotImplementedError, match=f'^{kind.__name__} has no weights'):
        mixer_weights(mixer, q, k, GRID, GRID)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('name', OPTIONS)
def test_weights_of_linear_attentions_are_combinations_of_the_keys_of_their_states(name, masked):
    """Compare with keys computed as the states of one-hot values."""
    mixer, count = build(OPTIONS[name]), 12 if masked else 15
    q, k, _ = tokens(mixer)
    shared = dict(mask=torch.arange(15).expand(2, 15) < count if masked else None, **terms(mixer))
    ones = torch.zeros(15, *k.shape[:2], mixer.widths[2], dtype=k.dtype)
    ones[torch.arange(15), :, torch.arange(15)] = 1
    states = [mixer_state(mixer, q, k, one, GRID, GRID, **shared) for one in ones]
    if mixer.quadratic:
        assert states == [None] * 15
        return
    keys = torch.stack([state[..., 0] for state in states], dim=2)  # (B, heads, M, d)
    assert not keys[:, :, count:].any()
    weights = mixer_weights(mixer, q, k, GRID, GRID, **shared)
    if name in OWN_VALUE:
        weights = weights - torch.eye(15) / 2
    keys, weights = torch.cat((keys, torch.ones_like(keys[..., :1])), dim=-1)[:, :, :count], weights[..., :count].mT
    rest = keys @ torch.linalg.lstsq(keys, weights).solution - weights
    assert rest.norm() < 1e-10 * weights.norm()
    if name == 'efficient':  # each channel is a distribution over the tokens
        torch.testing.assert_close(keys[..., :-1].sum(dim=2), torch.ones_like(keys[:, :, 0, :-1]))
