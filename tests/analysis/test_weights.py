# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""``mixer.weights``: the map that a mixer amounts to, against what the mixer does; states, against their equations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from twins import ATTENTIONS

from mmlinattn.analysis.weights import convolved, local_weights, state_keys
from mmlinattn.attention import Grid, TokenMixer, get_mixer
from mmlinattn.attention.base import add_local
from mmlinattn.layers import rotary_table
from mmlinattn.ops.rotary import rotate_reference
from mmlinattn.ops.tensors import merge_heads, split_heads

DIM, HEADS, GRID = 16, 2, Grid(3, 5)
# the maps alone: what a mixer adds from the neighbourhood is looked at by itself below
PLAIN = {'inline': dict(local_residual=False), 'focused': dict(local_kernel=None), 'angular': dict(conv=None)}
OPTIONS = {
    # of a power of 32 the 1e-6 of the normaliser shows in the sums
    **{name: spec for name, spec in ATTENTIONS.items() if name not in ('angular, sequence', 'focused, power 32')},
    'focused, p = 4.5': dict(type='focused', power=4.5),
}


def build(options, dtype=torch.float64, plain=True):
    name = options if isinstance(options, str) else options['type']
    kind, options = get_mixer(options)
    options = {**options, **(PLAIN.get(name, {}) if plain else {})}
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
    return merge_heads(nn.functional.normalize(mixed, dim=-1) if mixer.unit_output else mixed)


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_weights_times_values_are_the_output(options, dtype, masked):
    """With a rotary encoding, a bias and a mask of real tokens where the mixer heeds them; nothing is overwritten."""
    mixer, mask = build(options, dtype), None
    if masked:
        mask = torch.rand(2, 15) > 0.4
        mask[:, 0] = True
    q, k, v = tokens(mixer, mask=mask, dtype=dtype)
    shared = dict(mask=mask)
    if mixer.rotary:
        shared['rotary'] = rotary_table(3, 5, mixer.head_dim, dtype=dtype)
    if mixer.bias:
        shared['bias'] = torch.randn(2, mixer.num_heads, 15, 15, dtype=dtype)
    before, state = (q.clone(), k.clone()), torch.get_rng_state()
    with torch.inference_mode():
        weights = mixer.weights(q, k, GRID, GRID, **shared)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1]) and torch.equal(torch.get_rng_state(), state)
    assert weights.shape == (2, mixer.num_heads, 15, 15) and not weights.requires_grad
    if masked:
        assert not weights.masked_select(~mask[:, None, None]).any()
    mixed, tolerance = by_head(mixer, weights, v), 1e-10 if dtype == torch.float64 else 1e-5
    for grad in (False, True):  # the attention in training takes another path
        with torch.set_grad_enabled(grad):
            out = mixer(q.clone(), k.clone(), v, GRID, GRID, **shared)
        assert (mixed - out).norm() <= tolerance * out.norm()
    rows = [7, 0, 14, 7]
    for index in (rows, torch.tensor(rows), torch.tensor(rows, dtype=torch.uint8)):  # PyTorch takes bytes for masks
        torch.testing.assert_close(mixer.weights(q, k, GRID, GRID, **shared, rows=index), weights[:, :, rows])
    assert mixer.weights(q, k, GRID, GRID, **shared, rows=[]).shape == (2, mixer.num_heads, 0, 15)


@pytest.mark.parametrize('name', sorted(set(OPTIONS) - {'focused, p = 4.5'}))  # whose products are as small as eps
def test_which_weights_sum_to_one(name):
    """Without a rotary encoding, which RALA's divisor leaves out."""
    mixer = build(OPTIONS[name])
    q, k, _ = tokens(mixer)
    sums = mixer.weights(q, k, GRID, GRID).sum(dim=-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=0.01) == mixer.normalised


def test_angular_weights_are_those_of_the_paper():
    """Of the released form, which no output tells: every output has a norm of one."""
    mixer = build('angular')
    q, k, _ = tokens(mixer)
    q_, k_ = (nn.functional.normalize(split_heads(t, HEADS), dim=-1) for t in (q, k))
    expected = torch.eye(15) / 2 + q_ @ k_.mT / math.pi
    torch.testing.assert_close(mixer.weights(q, k, GRID, GRID), expected)


@pytest.mark.parametrize('name', ['softmax', 'inline', 'focused', 'hallucinated', 'hydra', 'efficient', 'enhanced'])
def test_reduced_keys_and_class_tokens(name):
    """Queries 1 + 6x4, keys 1 + 3x2 as of a reduced map; the position table is resized to the keys."""
    mixer = build(name)
    grid, key_grid = Grid(6, 4, prefix=1), Grid(3, 2, prefix=1)
    q, k, v = tokens(mixer, grid.num_tokens, key_grid.num_tokens)
    weights = mixer.weights(q, k, grid, key_grid)
    assert weights.shape == (2, mixer.num_heads, 25, 7)
    torch.testing.assert_close(by_head(mixer, weights, v), mixer(q, k, v, grid, key_grid))


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_half_precision_is_widened_and_autocast_heeded_not(options):
    mixer = build(options, torch.float32)
    q, k, _ = (t.bfloat16() for t in tokens(mixer))
    shared = {}
    if mixer.rotary:
        shared['rotary'] = rotary_table(3, 5, mixer.head_dim)
    if mixer.bias:
        shared['bias'] = torch.randn(1, mixer.num_heads, 15, 15).bfloat16()
    expected = mixer.weights(q.float(), k.float(), GRID, GRID, **shared)
    with torch.autocast('cpu', torch.bfloat16):
        weights = mixer.weights(q, k, GRID, GRID, **shared)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_an_item_of_padding_alone_has_no_weights(options):
    mixer = build(options)
    q, k, _ = tokens(mixer)
    weights = mixer.weights(q, k, GRID, GRID, mask=torch.tensor([[True], [False]]).expand(2, 15))
    assert not weights[1].any() and weights[0].any(dim=-1).all() and weights.isfinite().all()


@pytest.mark.parametrize('prefix', [0, 1])
@pytest.mark.parametrize('conv', ['grid', 'sequence'])
@pytest.mark.parametrize('name', ['inline', 'focused', 'angular'])
def test_weights_and_the_local_term_are_the_whole_output(name, conv, prefix):
    mixer = build(dict(type='angular', form='paper', conv=conv) if name == 'angular' else name, plain=False)
    grid = Grid(3, 5, prefix=prefix)
    q, k, v = tokens(mixer, grid.num_tokens, grid.num_tokens)
    context = torch.randn(2, DIM, dtype=torch.float64) if mixer.context else None
    if name == 'focused':
        nn.init.zeros_(mixer.local.bias)  # no weight: a constant
    kernels = mixer.local_kernels(context)
    mixed = by_head(mixer, mixer.weights(q, k, grid, grid), v) + convolved(v, kernels, grid)
    torch.testing.assert_close(mixed, mixer(q, k, v, grid, grid, context=context))


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    prefix=st.integers(0, 2),
    size=st.sampled_from([(1, 1), (3, 3), (5, 5), (9, 1)]),
    heads=st.sampled_from([1, 2, 4]),
)
def test_a_convolution_as_a_matrix(height, width, prefix, size, heads):
    """Of each head the mean over its channels; over the map, or the whole sequence; each item with its own kernels."""
    grid = Grid(height, width, prefix)
    kernels = torch.randn(2, 4, *size, dtype=torch.float64)
    v = torch.randn(2, grid.num_tokens, heads, dtype=torch.float64).repeat_interleave(4 // heads, dim=-1)
    mixed = local_weights(kernels, grid, heads) @ split_heads(v, heads)
    for item in range(2):
        conv = nn.Conv2d(4, 4, size, padding=(size[0] // 2, size[1] // 2), groups=4, bias=False).double()
        conv.weight.data = kernels[item][:, None]
        along = Grid(grid.num_tokens, 1) if size == (9, 1) else grid
        alone = add_local(torch.zeros_like(v[:1]), v[item : item + 1], conv, along, watched=True)
        expected = split_heads(alone, heads).mean(dim=-1)
        torch.testing.assert_close(mixed[item].mean(dim=-1), expected[0])
        torch.testing.assert_close(convolved(v, kernels, grid)[item], alone[0])
    few = local_weights(kernels, grid, heads, rows=[grid.num_tokens - 1])
    torch.testing.assert_close(few, local_weights(kernels, grid, heads)[:, :, -1:])


class Squared(TokenMixer):
    """A mixer that says nothing about its weights, and overwrites its queries."""

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


class WideHeads(Squared):
    widths = DIM, DIM, DIM + 1


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
def test_a_mixer_of_ones_own(masked):
    mixer = Squared(DIM, HEADS)
    mask = torch.arange(15).expand(2, 15) < 9 if masked else None
    q, k, v = tokens(mixer, mask=mask)
    shared = dict(mask=mask, bias=torch.rand(1, HEADS, 15, 15))
    weights = mixer.weights(q, k, GRID, GRID, **shared)
    torch.testing.assert_close(by_head(mixer, weights, v), mixer(q, k, v, GRID, GRID, **shared))


@pytest.mark.parametrize('kind', [WithNeighbours, NotANumber, OfContext, WideHeads])
def test_what_is_no_map_is_refused(kind):
    mixer = kind(DIM, HEADS)
    q, k, _ = tokens(mixer)
    with pytest.raises(NotImplementedError, match=f'^{kind.__name__} has no weights'):
        mixer.weights(q, k, GRID, GRID)


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([15], r'rows from 15 to 15 have to lie in \[0, 14\]'),
        ([3, -1], r'rows from -1 to 3 have to lie in \[0, 14\]'),
        ([0.5], 'sequence of indices'),
        ([[0, 1]], 'sequence of indices'),
        ([True, False], 'sequence of indices'),
    ],
)
def test_rows_out_of_range(rows, message):
    mixer = build('softmax')
    q, k, _ = tokens(mixer)
    with pytest.raises(ValueError, match=message):
        mixer.weights(q, k, GRID, GRID, rows=rows)


# --- states -----------------------------------------------------------------------------------------------------------


def rala_keys(q, k, mask, rotary):
    """RALA Eq. 3: a = softmax over tokens of mean(q) . k / sqrt(d)."""
    q, k = (nn.functional.elu(t) + 1 for t in (q, k))
    logits = k @ q[mask].mean(dim=0) / math.sqrt(q.shape[-1])
    return rotate_reference(k * logits.masked_fill(~mask, -math.inf).softmax(dim=0)[:, None], rotary)


KEYS = {
    'rala': (dict(type='rala'), rala_keys),
    'rala, no weights': (
        dict(type='rala', augment_kv=False, kernel='relu'),
        lambda q, k, mask, rotary: rotate_reference(k.relu(), rotary),
    ),
    'inline': (dict(type='inline', kernel='relu'), lambda q, k, mask, _: k.relu() - k.relu()[mask].mean(dim=0)),
    'inline, linear': (dict(type='inline', injective=False, kernel='exp'), lambda q, k, *_: (0.2 * k).exp()),
    'efficient': ('efficient', lambda q, k, mask, _: k.masked_fill(~mask[:, None], -math.inf).softmax(dim=0)),
    'enhanced': ('enhanced', lambda q, k, *_: k.relu()),
    'angular': ('angular', lambda q, k, *_: nn.functional.normalize(k, dim=-1)),
}


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('name', KEYS)
def test_keys_of_states(name, masked):
    options, equation = KEYS[name]
    mixer = build(options)
    q, k, _ = tokens(mixer)
    mask = torch.arange(15).expand(2, 15) < (9 if masked else 15)
    rotary = rotary_table(3, 5, mixer.head_dim, dtype=torch.float64)
    keys = state_keys(mixer, q, k, GRID, mask if masked else None, rotary if mixer.rotary else None)
    heads = [split_heads(t, HEADS) for t in (q, k)]
    for item in range(2):
        for head in range(HEADS):
            expected = equation(heads[0][item, head], heads[1][item, head], mask[item], rotary)
            torch.testing.assert_close(keys[item, head], expected * mask[item][:, None])


def test_keys_of_other_states():
    """Focused ones with their positions and norms over all channels, Hydra's a channel each; none of softmax."""
    for mixer in (build('focused'), build(dict(type='focused', focus=False)), build('hydra')):
        q, k, _ = tokens(mixer)
        keys = merge_heads(state_keys(mixer, q, k, GRID, None, None))
        if hasattr(mixer, 'position'):
            r = (k + mixer.position.on(GRID)).relu() + 1e-6
            r = r / nn.functional.softplus(mixer.scale) if mixer.focus else r
            cube = r**3 if mixer.focus else r
            expected = cube * r.norm(dim=-1, keepdim=True) / cube.norm(dim=-1, keepdim=True)
        else:
            expected = nn.functional.normalize(k, dim=-1)
        torch.testing.assert_close(keys, expected)
        mask = torch.arange(15).expand(2, 15) < 9
        masked = merge_heads(state_keys(mixer, q, k, GRID, mask, None))
        torch.testing.assert_close(masked, expected * mask[..., None])
    for name in ('softmax', 'hallucinated'):
        assert state_keys(build(name), *tokens(build(name))[:2], GRID, None, None) is None
