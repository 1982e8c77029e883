# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measures of attention maps with known results, and of blocks in every arrangement and for sampled queries."""

import math

import pytest
import torch
from helpers import small_backbones
from helpers.references import ATTENTIONS
from torch import nn

from mmlinattn.attention import (
    Attention,
    GlobalAttention,
    ReducedAttention,
    ReducedKeysAttention,
    StageContext,
    WindowAttention,
)
from mmlinattn.backbones import RAVLT, LinearCSWin, LinearDeiT, LinearPVT, LinearSwin
from mmlinattn.backbones.nextvit_blocks import AveragedKeysAttention
from mmlinattn.tooling.analysis import inspecting
from mmlinattn.tooling.analysis.capture import Window, arrangements, watched
from mmlinattn.tooling.analysis.inspecting import full_map, measure_block, query_map

SMALL = dict(embed_dims=(16, 32, 32, 32), depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 4))
EVERYTHING = ('rank', 'confusion', 'locality', 'sharpness', 'ccs')


@pytest.mark.parametrize('shape', [(8, 8), (200, 8), (8, 200), (30, 20)])
@pytest.mark.parametrize('rank', [1, 3, 8])
def test_a_product_of_rank_r_has_rank_r(rank, shape):
    matrix = torch.randn(2, shape[0], rank) @ torch.randn(2, rank, shape[1])
    found = inspecting.ranks(matrix)
    assert found['rank'] == [rank] * 2 and max(found['above_1_percent']) <= rank
    assert all(1 - 1e-4 <= value <= rank + 1e-3 for value in found['effective'])
    assert inspecting.ranks(3e5 * matrix)['rank'] == [rank] * 2  # relative to the largest


def test_effective_rank_and_threshold():
    for values, rank, above, effective in (
        ((4.0, 4.0, 4.0, 0.0), 3, 3, 3),
        ((1.0, 0.02, 0.005, 0.0), 3, 2, None),
        ((0.0, 0.0, 0.0, 0.0), 0, 0, 0),
    ):
        found = inspecting.ranks(torch.tensor(values).diag()[None])
        assert (found['rank'], found['above_1_percent'], found['at_most']) == ([rank], [above], 4)
        assert effective is None or found['effective'] == pytest.approx([effective])
    orthogonal = torch.linalg.qr(torch.randn(16, 16))[0]
    assert inspecting.ranks(orthogonal[None])['effective'] == pytest.approx([16])


def test_distances_of_pairs_that_are_close():
    weights = torch.tensor([10.0, 0, 0]).repeat(1, 30, 1)
    weights[0, 0, 1] = 1e-4
    found = inspecting.pair_distances(weights)[0]
    assert found[:29].tolist() == pytest.approx([1e-4] * 29, rel=1e-3) and found[29:].max() < 1e-6


def test_similarity_of_heads():
    one, other = torch.rand(2, 6, 9).unbind()
    assert inspecting.cross_head_similarity(torch.stack((one, 2 * one, one))) == pytest.approx(1)
    disjoint = torch.zeros(2, 1, 4)
    disjoint[0, 0, :2], disjoint[1, 0, 2:] = 1, 1
    assert inspecting.cross_head_similarity(disjoint) == 0
    mixed = (one.flatten() @ other.flatten() / one.norm() / other.norm()).item()
    assert inspecting.cross_head_similarity(torch.stack((one, other, one))) == pytest.approx((2 * mixed + 1) / 3)


def block_of(attention, x):
    found = []
    with watched(nn.Sequential(attention.eval()), found.append):
        attention(x, StageContext.of(x))
    return found[0]


def measured(attention, x, what=EVERYTHING, **options):
    return measure_block(block_of(attention, x), what, **options)


def known(monkeypatch, weights, with_local=None):
    """Replace the weights of any attention by (n, M) weights."""
    maps = {False: weights, True: with_local}
    monkeypatch.setattr(Window, 'weights', lambda self, rows, local=False: maps[local][None, rows])
    local = [] if with_local is None else ['one']
    monkeypatch.setattr(Window, 'convolutions', lambda self, of_mixer=False: [] if of_mixer else local)


def test_every_number_of_a_block(monkeypatch):
    """Compare with numbers computed by hand for four tokens. Two have equal weights, and one has a negative weight."""
    weights = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1.2, -1.6]])
    known(monkeypatch, weights, torch.eye(4))
    monkeypatch.setattr(Window, 'error', lambda self, rows, weights: float(weights[0, 3, 3]))
    entry = measured(GlobalAttention(8, 1, 'softmax'), torch.randn(1, 1, 4, 8))
    ranks = entry.pop('rank')
    last = -(3 / 7 * math.log(3 / 7) + 4 / 7 * math.log(4 / 7))
    locality = dict(chance=9 / 4, if_uniform=10 / 16, sum=[(3 - 0.4) / 4], share=[1], sum_with_local=[1])
    sharpness = dict(entropy=[last / 4], entropy_if_uniform=math.log(4), negative=[4 / 7 / 4], top_9=[1], top_25=[1])
    expected = dict(
        confusion=dict(share=[1 / 6], median_distance=[2**0.5], mean_norm=[5 / 4]),
        locality=dict(locality, share_with_local=[1]),
        sharpness=dict(sharpness, top_1=[(3 + 4 / 7) / 4]),
    )
    for measure, numbers in expected.items():
        assert entry.pop(measure) == {key: pytest.approx(value) for key, value in numbers.items()}
    for name, number in (('weights', 3), ('weights_with_local', 4)):
        found = ranks[name]
        assert found['rank'] == found['above_1_percent'] == [number] and found['at_most'] == 4
    assert set(ranks) == {'weights', 'weights_with_local', 'output', 'projected'}
    assert entry.pop('forward_error') == pytest.approx(-1.6)
    sizes = dict(map=[1, 4], key_map=[1, 4], windows=1, queries_a_window=4, keys_a_window=4, sampled_queries=4)
    assert entry == dict(block='0', mixer='softmax', heads=1, ccs=None, **sizes)
    some = measured(GlobalAttention(8, 1, 'softmax'), torch.randn(1, 1, 4, 8), ['ccs'])
    assert set(some) & set(EVERYTHING) == {'ccs'}


def test_queries_are_sampled_evenly_from_at_most_eight_windows():
    block = block_of(WindowAttention(8, 2, 'softmax', (2, 2)), torch.randn(1, 6, 6, 8))
    for limit, sampled in ((2, 2), (7, 6), (17, 16), (31, 24), (1000, 32)):
        assert measure_block(block, (), limit)['sampled_queries'] == sampled


def test_the_negative_share_is_a_mean_over_the_sampled_queries(monkeypatch):
    known(monkeypatch, torch.tensor([[0.5, 0.5, 1.0, -2.0]] * 4))
    entry = measured(GlobalAttention(8, 1, 'softmax'), torch.randn(1, 1, 4, 8), ['sharpness'], num_queries=2)
    assert entry['sampled_queries'] == 2 and entry['sharpness']['negative'] == [0.5]


SEQUENTIAL = [spec for spec in ATTENTIONS.values() if Attention(16, 2, spec).mixer.sequential]
IN_A_ROW = [*SEQUENTIAL, *small_backbones.every_attention()]
BACKBONES = {
    **{
        f'windows, {attns}': lambda attns=attns: LinearSwin(dict(SMALL, stage_attns=attns, window=4))
        for attns in small_backbones.mixes('LinearSwin')
    },
    'windows, cut and shifted': lambda: LinearSwin(
        dict(SMALL, stage_attns=('inline', 'focused', 'softmax', 'rala'), linear_windows=(13, 7, 7, 7), window=4)
    ),
    'whole map, gate, 5x5, rotary': lambda: RAVLT(SMALL),
    'reduced keys': lambda: LinearPVT(dict(SMALL, stage_attns=('inline', 'softmax', 'softmax', 'focused'))),
    'stripes': lambda: LinearCSWin(
        dict(SMALL, stage_attns=('inline', 'softmax', 'rala', 'softmax'), stripes=(1, 2, 3, None))
    ),
    'class token': lambda: LinearDeiT(
        dict(embed_dims=(32,), depths=(len(IN_A_ROW),), num_heads=(2,), stage_attns=(IN_A_ROW,))
    ),
}


def row_by_keys(block, token):
    """Return the attention weights of a token, (heads, keys), by a loop over keys."""
    rows = []
    for branch in block.branches:
        ((window, index),) = ((w, int(at)) for w in branch for at in (w.queries == token).nonzero())
        weights = window.weights(torch.tensor([index]))[:, 0]
        rows.append(torch.full((len(weights), math.prod(block.key_size)), math.nan))
        for key, place in enumerate(window.keys.tolist()):
            if place >= 0:
                rows[-1][:, place] = weights[:, key]
    return torch.cat(rows)


@pytest.mark.parametrize('backbone', BACKBONES.values(), ids=BACKBONES)
def test_weights_in_backbones_are_those_of_the_forward_pass(backbone):
    """Use 100 x 130 pixels, so that windows are padded, cropped at the border, and shifted."""
    model = backbone().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(1, 3, 100, 130)
    with torch.no_grad():
        expected = model(x)
    found = []

    def look(block):
        row, column = block.size[0] // 2, block.size[1] - 1
        maps, classes = query_map(block, row, column)
        token = row * block.size[1] + column
        for weights in (maps.flatten(1), full_map(block, side=10**6)[:, token]):
            torch.testing.assert_close(weights, row_by_keys(block, token), equal_nan=True)
        found.append((measure_block(block, num_queries=32), maps, classes))

    with watched(model, look):
        out = model(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)  # equal but for rounding
    assert len(found) == len({entry['block'] for entry, *_ in found}) == len(arrangements(model)) == sum(model.depths)
    for entry, weights, classes in found:
        assert entry['forward_error'] < 1e-5, entry
        assert len(weights) == entry['heads'] == len(entry['locality']['sum'])
        assert all(len(entry['rank'][part]['rank']) == len(weights) for part in ('output', 'projected', 'weights'))
        if entry['mixer'] in ('softmax', 'inline'):  # rows that sum to one
            total = weights.nan_to_num().sum(dim=(1, 2)) + classes
            torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=1e-4)


def uniform(attention):
    nn.init.zeros_(attention.qkv.weight)
    return attention


@pytest.mark.parametrize(('size', 'sizes'), [((5, 6), (16, 8, 4, 2)), ((5, 5), (16, 4, 4)), ((4, 5), (16, 4))])
def test_windows_of_several_sizes(size, sizes):
    """Exclude padded keys. Windows of one token have no pairs and are skipped beside larger ones."""
    entry = measured(uniform(WindowAttention(8, 2, 'softmax', (4, 4))), torch.randn(1, *size, 8), num_queries=1000)
    total = sum(sizes)
    assert entry['sampled_queries'] == total and entry['confusion']['share'] == [1, 1]
    assert entry['locality']['chance'] == pytest.approx(len(sizes) * 9 / total)
    assert entry['sharpness']['entropy_if_uniform'] == pytest.approx(sum(n * math.log(n) for n in sizes) / total)
    assert entry['sharpness']['entropy'] == pytest.approx([entry['sharpness']['entropy_if_uniform']] * 2)


def test_ranks_are_those_of_features_state_and_weights():
    block = block_of(GlobalAttention(8, 2, 'rala'), torch.randn(1, 4, 5, 8))
    rank = measure_block(block, ('rank',))['rank']
    (window,) = block.windows
    for name, features in zip(('output', 'projected'), block.features()[0]):
        assert rank[name] == inspecting.ranks(features)
    assert rank['state'] == inspecting.ranks(window.state())
    assert rank['weights'] == inspecting.ranks(window.weights(torch.arange(20)))
    reduced = measured(ReducedAttention(8, 2, 'enhanced', 2, dict(type='LN')), torch.randn(1, 6, 8, 8), ('rank',))
    found = {part: numbers['at_most'] for part, numbers in reduced['rank'].items()}
    assert found == dict(weights=12, state=4, output=4, projected=4)


class Pooled(ReducedKeysAttention):
    def reduce(self, x):
        return x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).mean(dim=(2, 4))


@pytest.mark.parametrize(('kind', 'more'), [(AveragedKeysAttention, (2, 'sequence', dict(type='BN'))), (Pooled, ())])
def test_keys_on_no_grid_have_no_neighbourhood(kind, more):
    block = block_of(kind(8, 2, 'softmax', *more), torch.randn(1, 6, 8, 8))
    entry = measure_block(block)
    assert entry['keys_a_window'] == 12 and 'locality' not in entry and entry['forward_error'] < 1e-5
    with pytest.raises(ValueError, match='lie on no grid'):
        query_map(block, 0, 0)


def test_tokens_outside_of_the_feature_map_and_subsampled_attention_maps(monkeypatch):
    block = block_of(GlobalAttention(8, 2, 'softmax', local_kernel=3), torch.randn(1, 6, 7, 8))
    for row, column in ((6, 0), (0, 7), (-1, 0), (0, -1)):
        with pytest.raises(
            ValueError, match=rf'row={row}, column={column} is outside of the feature map of 0, \(6, 7\)'
        ):
            query_map(block, row, column)
    whole, some = full_map(block, 42), full_map(block, 20)
    assert whole.shape == (2, 42, 42) and some.shape == (2, 14, 14)  # every third token
    torch.testing.assert_close(some, whole[:, ::3, ::3])
    torch.testing.assert_close(whole[:, 9], query_map(block, 1, 2)[0].flatten(1))
    assert not torch.allclose(whole[:, 9], query_map(block, 1, 2, local=True)[0].flatten(1))
    monkeypatch.setattr(inspecting, 'NUMEL', 3 * 2 * 42)  # three rows at a time
    torch.testing.assert_close(full_map(block, 42), whole)
    assert measure_block(block)['sampled_queries'] == 3
    # windows without a shown token hide none of the others
    block = block_of(WindowAttention(8, 2, 'softmax', window=(2, 2)), torch.randn(1, 4, 10, 8))
    torch.testing.assert_close(full_map(block, 5), full_map(block, 40)[:, ::8, ::8], equal_nan=True)
