# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``mixer.weights``: the map that a mixer amounts to, against what the mixer does."""

import pytest
import torch
from test_masks import MIXERS
from torch import nn

from mmlinattn.attention import Grid, TokenMixer, get_mixer
from mmlinattn.attention.grid import add_local
from mmlinattn.attention.weights import local_weights
from mmlinattn.layers import rotary_table
from mmlinattn.ops.tensors import merge_heads, split_heads

DIM, HEADS, GRID = 16, 2, Grid(3, 5)
# the maps alone: what a mixer adds from the neighbourhood is looked at by itself below
PLAIN = {'inline': dict(local_residual=False), 'focused': dict(local_kernel=None), 'angular': dict(conv=None)}
OPTIONS = {
    **MIXERS,
    'rala, paper': dict(type='rala', scale_weights=False),
    'rala, softmax': dict(type='rala', kernel='softmax'),
    'focused, p = 4.5': dict(type='focused', power=4.5),
    'hallucinated, chh first': dict(type='hallucinated', steps=('chh', 'ihh')),
    'hallucinated, ihh': dict(type='hallucinated', steps=('ihh',)),
    'hallucinated, chh': dict(type='hallucinated', steps=('chh',)),
    'hallucinated, copies': dict(type='hallucinated', steps=()),
    'angular, paper': dict(type='angular', form='paper'),
}


def build(options, grid=(3, 5), dtype=torch.float64, plain=True):
    name = options if isinstance(options, str) else options['type']
    kind, options = get_mixer(options)
    options = {**options, **(PLAIN.get(name, {}) if plain else {})}
    mixer = kind(DIM, HEADS, grid=grid, **options).to(dtype)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return mixer.eval()


def tokens(mixer, num_queries, num_keys, mask=None, dtype=torch.float64, batch=2):
    q, k, v = (
        torch.randn(batch, num, width, dtype=dtype)
        for num, width in zip((num_queries, num_keys, num_keys), mixer.widths)
    )
    return q, k, v if mask is None else v * mask.unsqueeze(-1).to(dtype)


def by_head(mixer, weights, v):
    mixed = weights @ split_heads(v, weights.shape[1]).to(weights.dtype)
    return merge_heads(nn.functional.normalize(mixed, dim=-1) if mixer.unit_output else mixed)


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_weights_times_values_are_the_output(options, dtype, masked):
    """With a rotary encoding, a bias and a mask of real tokens where the mixer heeds them."""
    mixer = build(options, dtype=dtype)
    mask = None
    if masked:
        mask = torch.rand(2, GRID.num_tokens) > 0.4
        mask[:, 0] = True
    q, k, v = tokens(mixer, GRID.num_tokens, GRID.num_tokens, mask, dtype)
    shared = dict(mask=mask)
    if mixer.rotary:
        shared['rotary'] = rotary_table(3, 5, mixer.head_dim, dtype=dtype)
    if mixer.bias:
        shared['bias'] = torch.randn(1, mixer.num_heads, GRID.num_tokens, GRID.num_tokens, dtype=dtype)
    given = q.clone(), k.clone()
    weights = mixer.weights(q, k, GRID, GRID, **shared)
    assert torch.equal(q, given[0]) and torch.equal(k, given[1])  # nothing is overwritten
    assert weights.shape == (2, mixer.num_heads, GRID.num_tokens, GRID.num_tokens)
    if masked:
        assert not weights.masked_select(~mask[:, None, None]).any()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    with torch.no_grad():
        out = mixer(q.clone(), k.clone(), v, GRID, GRID, **shared)
    mixed = by_head(mixer, weights, v)
    assert (mixed - out).norm() <= tolerance * out.norm()
    # the attention in training takes another path
    with torch.enable_grad():
        out = mixer(q, k, v, GRID, GRID, **shared)
    assert (mixed - out).norm() <= tolerance * out.norm()
    rows = [7, 0, 14, 7]
    torch.testing.assert_close(mixer.weights(q, k, GRID, GRID, **shared, rows=rows), weights[:, :, rows])
    for kind in (torch.int64, torch.int32, torch.uint8):  # indices all; PyTorch takes bytes for masks
        few = mixer.weights(q, k, GRID, GRID, **shared, rows=torch.tensor(rows, dtype=kind))
        torch.testing.assert_close(few, weights[:, :, rows])


@pytest.mark.parametrize('name', sorted(set(OPTIONS) - {'focused, p = 4.5'}))  # whose products are as small as eps
def test_which_weights_sum_to_one(name):
    """Without a rotary encoding, which RALA's divisor leaves out."""
    mixer = build(OPTIONS[name])
    q, k, _ = tokens(mixer, GRID.num_tokens, GRID.num_tokens)
    sums = mixer.weights(q, k, GRID, GRID).sum(dim=-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=0.01) == mixer.normalised


@pytest.mark.parametrize('name', ['softmax', 'inline', 'focused', 'hallucinated', 'hydra', 'efficient', 'enhanced'])
def test_reduced_keys_and_class_tokens(name):
    """Queries 1 + 6x4, keys 1 + 3x2 as of a reduced map; the position table is resized to the keys."""
    mixer = build(name)
    grid, key_grid = Grid(6, 4, prefix=1), Grid(3, 2, prefix=1)
    q, k, v = tokens(mixer, grid.num_tokens, key_grid.num_tokens)
    weights = mixer.weights(q, k, grid, key_grid)
    assert weights.shape == (2, mixer.num_heads, 25, 7)
    torch.testing.assert_close(by_head(mixer, weights, v), mixer(q, k, v, grid, key_grid))
    rows = [24, 0, 7]  # of the queries, of which there are more than keys
    torch.testing.assert_close(mixer.weights(q, k, grid, key_grid, rows=rows), weights[:, :, rows])
    with pytest.raises(ValueError, match=r'^rows from 25 to 25 have to lie in \[0, 24\], the queries of this grid$'):
        mixer.weights(q, k, grid, key_grid, rows=[25])


def test_rows_of_a_bias_for_each_window():
    mixer = build('softmax')
    q, k, v = tokens(mixer, 15, 15)
    for shape in ((2, HEADS, 15, 15), (2, 1, 1, 15), (1, HEADS, 15, 15), (15, 15)):
        bias = torch.randn(shape, dtype=torch.float64)
        weights = mixer.weights(q, k, GRID, GRID, bias=bias)
        few = mixer.weights(q, k, GRID, GRID, bias=bias, rows=[3, 9])
        torch.testing.assert_close(few, weights[:, :, [3, 9]])
    bias = torch.randn(2, HEADS, 15, 15, dtype=torch.float64)
    out = mixer(q, k, v, GRID, GRID, bias=bias)
    torch.testing.assert_close(by_head(mixer, mixer.weights(q, k, GRID, GRID, bias=bias), v), out)


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_half_precision_is_widened_and_autocast_heeded_not(options):
    mixer = build(options, dtype=torch.float32)
    q, k, _ = tokens(mixer, 15, 15, dtype=torch.float32)
    shared = {}
    if mixer.rotary:
        shared['rotary'] = rotary_table(3, 5, mixer.head_dim)
    if mixer.bias:
        shared['bias'] = torch.randn(1, mixer.num_heads, 15, 15).bfloat16()
    expected = mixer.weights(q.bfloat16().float(), k.bfloat16().float(), GRID, GRID, **shared)
    with torch.autocast('cpu', torch.bfloat16):
        weights = mixer.weights(q.bfloat16(), k.bfloat16(), GRID, GRID, **shared)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected)


LOCAL = {
    'inline': 'inline',
    'focused': 'focused',
    'angular': dict(type='angular', form='paper'),
    'angular, sequence': dict(type='angular', form='paper', conv='sequence'),
}


@pytest.mark.parametrize('options', LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize('prefix', [0, 1])
def test_the_local_term_as_a_matrix(options, prefix):
    """Its weights and those of the attention together, channel by channel, are the whole output."""
    mixer = build(options, plain=False)
    grid = Grid(3, 5, prefix=prefix)
    q, k, v = tokens(mixer, grid.num_tokens, grid.num_tokens)
    context = torch.randn(2, DIM, dtype=torch.float64) if mixer.context else None
    kernels = mixer.local_kernels(context)
    local = local_weights(kernels, grid)  # (B or 1, C, N, N)
    assert local.shape[1:] == (DIM, grid.num_tokens, grid.num_tokens)
    if options == 'focused':
        nn.init.zeros_(mixer.local.bias)  # no weight: a constant
    whole = mixer.weights(q, k, grid, grid).repeat_interleave(DIM // HEADS, dim=1) + local
    mixed = torch.einsum('bcnm,bmc->bnc', whole, v)
    torch.testing.assert_close(mixed, mixer(q, k, v, grid, grid, context=context))
    torch.testing.assert_close(local_weights(kernels, grid, rows=[4, 0]), local[:, :, [4, 0]])


def test_any_depthwise_kernel_as_a_matrix():
    conv = nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False).double()
    v = torch.randn(1, 8 * 6 + 1, 4, dtype=torch.float64)
    grid = Grid(8, 6, prefix=1)
    matrix = local_weights(conv.weight.squeeze(1)[None], grid)
    expected = add_local(torch.zeros_like(v), v, conv, grid)
    torch.testing.assert_close(torch.einsum('bcnm,bmc->bnc', matrix, v), expected)


class Squared(TokenMixer):
    """As in docs/add_an_attention.md: a mixer that says nothing about its weights."""

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        q, k = split_heads(q.square_(), self.num_heads) + 1, split_heads(k, self.num_heads) ** 2
        weights = q @ k.transpose(-1, -2)
        if mask is not None:
            weights = weights * mask[:, None, None]
        return merge_heads(weights / weights.sum(dim=-1, keepdim=True) @ split_heads(v, self.num_heads))


class WithNeighbours(Squared):
    def forward(self, q, k, v, *args, **kwargs):
        return super().forward(q, k, v, *args, **kwargs) + v.roll(1, 1) * torch.arange(v.shape[-1])


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
def test_a_mixer_that_says_nothing_is_asked_for_unit_values(masked):
    mixer = Squared(DIM, HEADS)
    mask = torch.arange(15).expand(2, 15) < 9 if masked else None
    q, k, v = tokens(mixer, 15, 15, mask)
    weights = mixer.weights(q, k, GRID, GRID, mask=mask)
    torch.testing.assert_close(mixer.weights(q, k, GRID, GRID, mask=mask, rows=[2, 11]), weights[:, :, [2, 11]])
    torch.testing.assert_close(by_head(mixer, weights, v), mixer(q, k, v, GRID, GRID, mask=mask))


class Heeding(TokenMixer):
    """Heeds all it is given, leaves the mask to the values, and gives large numbers."""

    bias = rotary = True

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        q, k = split_heads(q.mul_(3e6), self.num_heads), split_heads(k.add_(1), self.num_heads)
        weights = q @ k.transpose(-1, -2) + bias + rotary[:, :1, 0] * rotary[:, 1:2, 1]
        out = weights * (grid.width + 3 * key_grid.height) @ split_heads(v, self.num_heads)
        return merge_heads(out / 3 * 3)  # with rounding errors


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
def test_a_mixer_that_says_nothing_is_given_all_that_there_is(dtype):
    """Values are zero where tokens are not real; tokens and the state of PyTorch's random numbers stay as they are."""
    mixer, grid, key_grid = Heeding(DIM, HEADS), Grid(3, 5), Grid(2, 3)
    mask = torch.tensor([[True] * 6, [True, False] * 3])
    q, k, v = tokens(mixer, 15, 6, mask, dtype)
    shared = dict(mask=mask, bias=torch.randn(1, HEADS, 15, 6, dtype=dtype), rotary=torch.randn(15, 4, 2, dtype=dtype))
    given, state = (q.clone(), k.clone()), torch.get_rng_state()
    weights = mixer.weights(q, k, grid, key_grid, **shared)
    assert torch.equal(q, given[0]) and torch.equal(k, given[1])
    assert torch.equal(torch.get_rng_state(), state)
    heads = [split_heads(t, HEADS) for t in (3e6 * q, k + 1)]
    expected = heads[0] @ heads[1].transpose(-1, -2) + shared['bias']
    expected = 11 * (expected + shared['rotary'][:, :1, 0] * shared['rotary'][:, 1:2, 1])
    expected = expected * mask[:, None, None]
    torch.testing.assert_close(weights / 1e8, expected / 1e8, rtol=1e-4, atol=1e-6)


class NotANumber(Squared):
    def forward(self, q, k, v, *args, **kwargs):
        return super().forward(q, k, v, *args, **kwargs) * float('nan')


class OfContext(Squared):
    context = True


class WideHeads(Squared):
    widths = DIM, DIM, DIM + 1


@pytest.mark.parametrize('kind', [WithNeighbours, NotANumber, OfContext, WideHeads])
def test_what_is_no_map_is_refused(kind):
    mixer = kind(DIM, HEADS)
    q, k, _ = tokens(mixer, 15, 15)
    off = {WithNeighbours: r' \(off by [\d.e+]+\)', NotANumber: r' \(off by nan\)'}.get(kind, '')
    said = rf'^{kind.__name__} has no weights\(\): what it gives is not one matrix a head times the values{off}$'
    with pytest.raises(NotImplementedError, match=said):
        mixer.weights(q, k, GRID, GRID)


@pytest.mark.parametrize(
    'rows, message',
    [
        ([15], r'^rows from 15 to 15 have to lie in \[0, 14\], the queries of this grid$'),
        ([3, -1], r'^rows from -1 to 3 have to lie in \[0, 14\], the queries of this grid$'),
        ([0.5], r'^rows=\[0.5\] have to be a sequence of indices of queries$'),
        ([1j], 'sequence of indices'),
        ([[0, 1]], 'sequence of indices'),
        ([True, False], 'sequence of indices'),
    ],
)
@pytest.mark.parametrize('name', ['softmax', 'inline'])
def test_rows_out_of_range(name, rows, message):
    mixer = build(name)
    q, k, _ = tokens(mixer, 15, 15)
    with pytest.raises(ValueError, match=message):
        mixer.weights(q, k, GRID, GRID, rows=rows)
    if name == 'inline':
        with pytest.raises(ValueError, match=message):
            local_weights(torch.ones(1, 2, 3, 3), GRID, rows=rows)


@pytest.mark.parametrize('name', ['softmax', 'inline', 'hallucinated'])
def test_rows_of_nobody(name):
    mixer = build(name)
    q, k, _ = tokens(mixer, 15, 15)
    bias = torch.zeros(1, mixer.num_heads, 15, 15) if mixer.bias else None
    for rows in ([], (), torch.zeros(0, dtype=torch.long)):
        assert mixer.weights(q, k, GRID, GRID, bias=bias, rows=rows).shape == (2, mixer.num_heads, 0, 15)


@pytest.mark.parametrize('options', ['rala', 'inline', 'focused', dict(type='inline', kernel='relu', injective=False)])
def test_factors_give_the_state(options):
    """queries @ (keys^T v) + constant @ v is the output: the state is what the attention keeps of keys and values."""
    mixer = build(options)
    q, k, v = tokens(mixer, 15, 15)
    factors = mixer.factors(q, k, GRID, GRID)
    values = split_heads(v, mixer.num_heads)
    state = factors.keys.transpose(-1, -2) @ values
    assert state.shape == (2, HEADS, DIM // HEADS, DIM // HEADS)
    out = factors.queries @ state
    if factors.constant is not None:
        out = out + factors.constant @ values
    torch.testing.assert_close(merge_heads(out), mixer(q, k, v, GRID, GRID))
    assert build('softmax').factors(q, k, GRID, GRID) is None


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_an_item_of_padding_alone_has_no_weights(options):
    mixer = build(options)
    q, k, v = tokens(mixer, 15, 15)
    mask = torch.tensor([[True], [False]]).expand(2, 15)
    weights = mixer.weights(q, k, GRID, GRID, mask=mask)
    assert not weights[1].any() and weights[0].any(dim=-1).all() and weights.isfinite().all()
