# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What is measured of attentions, on maps whose answers are known, and on what hosts do with their tokens."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mmlinattn.analysis import inspecting, measures, pictures
from mmlinattn.analysis.capture import arrangements, watched
from mmlinattn.analysis.inspecting import averaged, coordinates, full_map, measure_block, query_map
from mmlinattn.analysis.loading import Picture
from mmlinattn.analysis.masking import masked, masked_weights
from mmlinattn.attention import (
    Attention,
    GlobalAttention,
    Grid,
    ReducedAttention,
    StripeAttention,
    TokenMixer,
    WindowAttention,
    get_mixer,
)
from mmlinattn.attention.grid import add_local
from mmlinattn.backbones import RAVLT, LinearCSWin, LinearDeiT, LinearPVT, LinearSwin
from mmlinattn.layers.linear import split_parts
from mmlinattn.ops.tensors import merge_heads, split_heads
from mmlinattn.utils.errors import RunError

SMALL = dict(embed_dims=(16, 32, 32, 32), depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 4))


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('rank', [1, 3, 8])
@pytest.mark.parametrize('shape', [(8, 8), (200, 8), (8, 200)])
def test_a_state_of_rank_r_has_rank_r(rank, shape):
    matrix = torch.randn(2, shape[0], rank) @ torch.randn(2, rank, shape[1])
    found = measures.ranks(matrix)
    assert found['rank'] == [rank] * 2
    assert all(1 - 1e-6 <= value <= rank + 1e-6 for value in found['effective'])


@pytest.mark.parametrize('shape', [(200, 8), (8, 200), (200, 100)])
def test_tolerance_of_the_rank_is_that_of_the_longer_side(shape):
    eps = torch.finfo(torch.float32).eps
    for value, rank in ((150 * eps, 1), (250 * eps, 2)):
        matrix = torch.zeros(1, *shape)
        matrix[0, 0, 0], matrix[0, 1, 1] = 1, value
        assert measures.ranks(matrix)['rank'] == [rank]


def test_effective_rank_and_threshold():
    values = torch.tensor([[4.0, 4.0, 4.0, 0.0], [1.0, 0.02, 0.005, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert measures.effective_rank(values)[0] == pytest.approx(3)
    assert measures.rank_above(values).tolist() == [3, 2, 0]
    assert measures.effective_rank(values)[2] == 0
    orthogonal = torch.linalg.qr(torch.randn(16, 16))[0]
    assert measures.ranks(orthogonal[None])['effective'] == pytest.approx([16])


def test_thresholds_are_those_that_are_given():
    """What lies on a threshold is neither above it nor closer."""
    values = torch.tensor([[1.0, 0.5, 0.25]])
    for threshold, rank in ((0.2, 3), (0.25, 2), (0.4, 2), (0.6, 1)):
        assert measures.rank_above(values, threshold).tolist() == [rank]
    weights = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]]])  # 1, 2 and the root of 5 apart
    for distance, share in ((1.0, 0), (1.5, 1 / 3), (2.0, 1 / 3), (2.1, 2 / 3), (3.0, 1)):
        assert measures.confusion(weights, distance).tolist() == pytest.approx([share])


def test_collinear_queries_confuse_linear_attention_and_not_inline():
    """InLine Prop. 1: what differs in length only is one query to a kernel that is divided by its sum."""
    q = torch.cat((torch.rand(1, 1, 4), 3 * torch.rand(1, 1, 4), torch.rand(1, 1, 4)), dim=1)
    q = torch.cat((q, 2 * q[:, :1]), dim=1).repeat(1, 1, 2)  # 0 and 3 are collinear
    k, grid = torch.randn(1, 9, 8) * 3, Grid(3, 3)
    relu, options = get_mixer(dict(type='inline', kernel='relu', injective=False, local_residual=False))
    linear = relu(8, 2, **options).weights(q, k, Grid(2, 2), grid)[0]
    distances = measures.pair_distances(linear)[0]
    assert distances[2] < 1e-4 and (distances[[0, 1, 3, 4, 5]] > 1e-3).all()  # pairs 01 02 03 12 13 23
    assert measures.confusion(linear).tolist() == pytest.approx([1 / 6] * 2)
    kind, options = get_mixer(dict(type='inline', kernel='relu', local_residual=False))
    injective = kind(8, 2, **options).weights(q, k, Grid(2, 2), grid)[0]
    assert measures.confusion(injective).tolist() == [0, 0]


def test_distances_of_equal_and_orthogonal_rows():
    weights = torch.eye(3)[[0, 1, 0]][None]
    assert measures.pair_distances(weights)[0].tolist() == pytest.approx([math.sqrt(2), 0, math.sqrt(2)], abs=1e-7)
    # the squares of distances of rows that are alike are rounded to either side of zero
    alike = torch.rand(40, 1, 30, dtype=torch.double) * (1 + 1e-9 * torch.rand(40, 5, 1, dtype=torch.double))
    np.testing.assert_allclose(measures.pair_distances(alike), 0, atol=1e-5)
    assert measures.confusion(alike).tolist() == [1] * 40


def places(height, width):
    index = torch.arange(height * width)
    return torch.stack((index // width, index % width), dim=-1)


def test_identity_maps_are_local_and_sharp():
    at = places(5, 7)
    near = measures.neighbours(at, at)
    total, share = measures.inside(torch.eye(35).expand(2, 35, 35), near)
    assert total.tolist() == share.tolist() == [1, 1]
    assert measures.entropy(torch.eye(35)) == 0
    assert measures.top_mass(torch.eye(35), 1) == 1


def test_uniform_maps_are_neither():
    at = places(5, 7)
    near = measures.neighbours(at, at)
    uniform = torch.full((1, 35, 35), 1 / 35)
    total, share = measures.inside(uniform, near)
    assert total.item() == pytest.approx(near.sum().item() / 35 / 35)  # 9 / N but for the border
    assert share.item() == pytest.approx(total.item())
    assert measures.entropy(uniform).item() == pytest.approx(math.log(35))
    assert measures.top_mass(uniform, 7).item() == pytest.approx(0.2)
    assert near[17].sum() == 9 and near[0].sum() == 4


@pytest.mark.parametrize('reach', [1, 2])
def test_each_window_has_neighbours_of_its_own(reach):
    """Of a batch: three queries and three keys, at other places in each of three windows."""
    queries, keys = torch.randint(6, (2, 3, 3, 2)).unbind()
    near = measures.neighbours(queries, keys, reach)
    for window in range(3):
        for i, (row, column) in enumerate(queries[window].tolist()):
            expected = [max(abs(row - y), abs(column - x)) <= reach for y, x in keys[window].tolist()]
            assert near[window, i].tolist() == expected


def test_negative_weights_count_by_magnitude():
    weights = torch.tensor([[[0.5, -0.5, 1.0]]])
    near = torch.tensor([[True, True, False]])
    total, share = measures.inside(weights, near)
    assert (total.item(), share.item()) == (0.0, 0.5)
    assert measures.top_mass(weights, 1).item() == 0.5


def test_weights_that_are_all_zero():
    """No rank, no entropy and no share rather than numbers that are none."""
    weights = torch.zeros(1, 3, 5)
    assert measures.ranks(weights) == dict(rank=[0], above_1_percent=[0], effective=[0])
    near = torch.ones(3, 5, dtype=torch.bool)
    assert [value.tolist() for value in measures.inside(weights, near)] == [[0], [0]]
    assert measures.entropy(weights).tolist() == measures.top_mass(weights, 2).tolist() == [0]
    assert measures.confusion(weights).tolist() == [1]


def test_small_distances_are_not_lost():
    """A tenth of what counts as confused, between rows of length ten."""
    one = torch.tensor([10.0, 0, 0])
    weights = torch.stack((one, one + torch.tensor([0, 1e-4, 0])))[None]
    assert measures.pair_distances(weights).item() == pytest.approx(1e-4, rel=1e-3)


def test_similarity_of_heads():
    one, other = torch.rand(2, 6, 9).unbind()
    assert measures.cross_head_similarity(torch.stack((one, 2 * one, one))) == pytest.approx(1)
    disjoint = torch.zeros(2, 1, 4)
    disjoint[0, 0, :2], disjoint[1, 0, 2:] = 1, 1
    assert measures.cross_head_similarity(disjoint) == 0
    pairs = [
        (a.flatten() @ b.flatten() / a.norm() / b.norm()).item() for a, b in ((one, other), (one, one), (other, one))
    ]
    expected = sum(pairs) / 3
    assert measures.cross_head_similarity(torch.stack((one, other, one))) == pytest.approx(expected)
    assert math.isnan(measures.cross_head_similarity(one[None]))


def test_means_of_entries():
    entries = [(dict(a=1.0, b=[1, 2], c=dict(d=4)), 1), (dict(a=2.0, b=[3, 2], c=dict(d=4), e=1), 3)]
    assert averaged(entries) == dict(a=1.75, b=[2.5, 2], c=dict(d=4))
    assert averaged([(dict(a=1.0, e=1.0), 1), (dict(a=4.0), 1), (dict(a=4.0, e=1.0), 1)]) == dict(a=3.0)
    with pytest.raises(ValueError, match='shorter'):  # numbers of other heads, which have no mean with these
        averaged([(dict(b=[1, 2]), 1), (dict(b=[3]), 1)])
    assert repr(averaged([(dict(heads=4, a=0.1), 3)] * 2)) == "{'heads': 4, 'a': 0.1}"  # what is one number stays it


# --- a whole map that is known ----------------------------------------------------------------------------------------


class Fixed(TokenMixer):
    """Weights that are given: the identity, or the mean of the left and right neighbour."""

    shift = 0

    def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
        return self.weights(q, k, grid, key_grid)[:, 0].to(v.dtype) @ v

    def weights(self, q, k, grid, key_grid, mask=None, rotary=None, bias=None, rows=None):
        eye = torch.eye(k.shape[1]).roll(self.shift, dims=1).expand(len(q), self.num_heads, -1, -1)
        return eye if rows is None else eye[:, :, rows]


class Wrapped(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return self.attn(x)


def fixed(shift):
    model = Wrapped(GlobalAttention(8, 2, 'softmax'))
    model.attn.mixer = Fixed(8, 2)
    model.attn.mixer.shift = shift
    return model.eval()


def measured(model, x, what=('rank', 'confusion', 'locality', 'sharpness', 'ccs'), **options):
    entries = []
    with watched(model, lambda block: entries.append(measure_block(block, what, **options))):
        model(x)
    return entries


def test_measures_of_a_known_attention():
    (entry,) = measured(fixed(0), torch.randn(1, 6, 8, 8))
    assert entry['locality']['sum'] == [1, 1] and entry['locality']['chance'] == pytest.approx(9 / 48)
    assert entry['sharpness']['top_1'] == [1, 1] and entry['sharpness']['entropy'] == [0, 0]
    assert entry['confusion']['share'] == [0, 0] and entry['ccs'] == pytest.approx(1)
    assert entry['rank']['weights']['rank'] == [48, 48] and entry['forward_error'] < 1e-6
    (entry,) = measured(fixed(4), torch.randn(1, 6, 8, 8))
    assert entry['locality']['sum'] == [0, 0] and entry['sharpness']['top_1'] == [1, 1]


@pytest.mark.parametrize(('heads', 'similarity'), [(2, 1 / 2), (4, (2 * 1 + 4 * 1 / 2) / 6)])
def test_directions_of_stripes_are_compared_with_each_other(heads, similarity):
    """Where nobody prefers any key, on 4 x 4 tokens: 4 of the 8 keys of one direction are keys of the other one."""
    attention = StripeAttention(8, heads, 'softmax', 2).eval()
    nn.init.zeros_(attention.qkv.weight)
    (entry,) = measured(Wrapped(attention), torch.randn(1, 4, 4, 8), what=('ccs',))
    assert entry['heads'] == heads and entry['ccs'] == pytest.approx(similarity)
    (entry,) = measured(Wrapped(GlobalAttention(8, 1, 'softmax')), torch.randn(1, 4, 4, 8), what=('ccs',))
    assert entry['ccs'] is None  # nothing to compare one head with


# --- every arrangement ------------------------------------------------------------------------------------------------

COMPARED = (['hallucinated', 'angular'], ['hydra', 'efficient'], 'enhanced', 'hallucinated')
HOSTS = {
    'the others in windows': lambda: LinearSwin(dict(SMALL, depths=(2, 2, 2, 2), stage_attns=COMPARED, window=4)),
    'the others, class token': lambda: LinearDeiT(
        dict(
            embed_dims=(32,),
            depths=(4,),
            num_heads=(2,),
            stage_attns=(['hallucinated', dict(type='angular', conv='sequence'), 'hydra', 'efficient'],),
        )
    ),
    'whole map, gate, 5x5, rotary': lambda: RAVLT(SMALL),
    'windows, cut and shifted': lambda: LinearSwin(
        dict(SMALL, stage_attns=('inline', 'focused', 'softmax', 'rala'), linear_windows=(13, 7, 7, 7), window=4)
    ),
    'reduced keys': lambda: LinearPVT(dict(SMALL, stage_attns=('inline', 'softmax', 'softmax', 'focused'))),
    'stripes': lambda: LinearCSWin(
        dict(SMALL, stage_attns=('inline', 'softmax', 'rala', 'softmax'), stripes=(1, 2, 3, None))
    ),
    'class token': lambda: LinearDeiT(
        dict(embed_dims=(32,), depths=(3,), num_heads=(2,), stage_attns=(['inline', 'softmax', 'focused'],))
    ),
}


@pytest.mark.parametrize('host', HOSTS.values(), ids=HOSTS)
def test_weights_in_hosts_are_those_of_the_forward_pass(host):
    """100 x 130 pixels: nothing divides, so windows pad, are cut at the border and are shifted."""
    model = host().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(1, 3, 100, 130)
    with torch.no_grad():
        expected = model(x)
    blocks, maps = [], []

    def look(block):
        blocks.append(measure_block(block, num_queries=32))
        row, column = block.size[0] // 2, block.size[1] - 1
        weights, classes = query_map(block, row, column)
        full = full_map(block, side=10**6)
        token = row * block.size[1] + column
        maps.append((block, weights, classes, full[:, token]))

    with watched(model, look):
        out = model(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)  # looking changes nothing
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(blocks) == len(arrangements(model)) == sum(model.depths)
    assert len({entry['block'] for entry in blocks}) == len(blocks)
    for entry, (_, weights, classes, row) in zip(blocks, maps):
        assert entry['forward_error'] < 1e-5, entry
        assert len(weights) == entry['heads'] == len(entry['locality']['sum'])
        assert all(len(entry['rank'][part]['rank']) == len(weights) for part in ('output', 'projected', 'weights'))
        torch.testing.assert_close(weights.flatten(1), row, equal_nan=True)
        if entry['mixer'] in ('softmax', 'inline'):  # rows that sum to one
            total = weights.nan_to_num().sum(dim=(1, 2)) + classes
            torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('mixer', ['softmax', 'rala'])
def test_padding_of_windows_is_no_key(mixer):
    """A map of 5 x 6 in windows of 4 x 4, of 16, 8, 4 and 2 tokens, padded or cut: what equal weights would be."""
    model, found = nn.Sequential(WindowAttention(8, 2, mixer, (4, 4))).eval(), []
    with watched(model, lambda block: found.append(measure_block(block, num_queries=1000))):
        model(torch.randn(1, 5, 6, 8))
    (entry,) = found
    sizes = [16, 8, 4, 2]
    assert entry['sampled_queries'] == 30
    assert entry['locality']['chance'] == pytest.approx(sum(n * 9 / n for n in sizes) / 30)
    assert entry['sharpness']['entropy_if_uniform'] == pytest.approx(sum(n * math.log(n) for n in sizes) / 30)


def test_heads_are_compared_in_all_windows():
    """One head looks at all of its window alike, the other one so on the left and at the token itself on the right."""
    attention = WindowAttention(8, 2, 'softmax', (2, 2)).eval()
    x = torch.zeros(1, 2, 4, 8)
    x[0, :, 2:, :4] = torch.eye(4).view(2, 2, 4)
    with torch.no_grad():
        attention.qkv.weight.zero_(), attention.qkv.bias.zero_()
        attention.qkv.weight[4:8, :4], attention.qkv.weight[12:16, :4] = 100 * torch.eye(4), torch.eye(4)
    (entry,) = measured(Wrapped(attention), x, what=('ccs',))
    assert entry['ccs'] == pytest.approx((1 + 1) / math.sqrt((1 + 1) * (1 + 4)))


def test_similarity_of_heads_is_the_same_each_time():
    """Of queries that are sampled, whatever random numbers were taken before."""
    model, x = Wrapped(GlobalAttention(8, 2, 'softmax')).eval(), torch.randn(1, 6, 8, 8)
    nn.init.normal_(model.attn.qkv.weight)
    assert len({measured(model, x, what=('ccs',), num_queries=4)[0]['ccs'] for _ in range(3)}) == 1


def test_the_largest_possible_rank():
    """Of 48 queries with 12 keys, in heads of 4 channels."""
    model = Wrapped(ReducedAttention(8, 2, 'enhanced', 2, dict(type='LN'))).eval()
    (entry,) = measured(model, torch.randn(1, 6, 8, 8), what=('rank',))
    assert {part: found['at_most'] for part, found in entry['rank'].items()} == dict(
        weights=12, state=4, output=4, projected=4
    )


class Averaged(ReducedAttention):
    """Keys that are averages over the sequence, as in the released Next-ViT."""

    reduction = 'sequence'

    def forward(self, x, **shared):
        tokens = x.flatten(1, 2)
        keys = tokens.unflatten(1, (-1, 4)).mean(dim=2)
        grid = Grid(*x.shape[1:3])
        return Attention.forward(self, tokens, grid, kv=keys, key_grid=Grid(1, keys.shape[1])).unflatten(1, grid[:2])


def test_keys_without_a_map_have_no_neighbourhood():
    model = Wrapped(Averaged(8, 2, 'softmax', 2, dict(type='LN'))).eval()
    (entry,) = measured(model, torch.randn(1, 6, 8, 8))
    assert entry['keys_a_window'] == 12 and 'locality' not in entry and entry['forward_error'] < 1e-5
    with pytest.raises(ValueError, match='lie on no map'), watched(model, lambda block: query_map(block, 0, 0)):
        model(torch.randn(1, 6, 8, 8))
    with pytest.raises(ValueError, match='have no neighbourhood'), masked(model, 3):
        pass


def test_neighbourhood_on_reduced_keys():
    """13 x 20 queries, keys of 8 x 8 patches of the padded map: 2 x 3. The query at (12, 7) lies in the cell (1, 0)."""
    found = []
    model = Wrapped(ReducedAttention(8, 2, 'softmax', 8, dict(type='LN'))).eval()
    with watched(model, found.append):
        model(torch.randn(1, 13, 20, 8))
    (block,) = found
    assert block.size == (13, 20) and block.key_size == (2, 3)
    queries, keys = coordinates(block, block.calls[0], 0, torch.tensor([12 * 20 + 7, 8, 16]))
    assert queries.tolist() == [[1, 0], [0, 1], [0, 2]] and keys.tolist() == places(2, 3).tolist()


@pytest.mark.parametrize('gate', [None, 'projection', 'tanh'])
def test_features_are_what_the_output_projection_sees(gate):
    attention = GlobalAttention(8, 2, dict(type='rala', output_gate=gate), local_kernel=3).eval()
    nn.init.normal_(attention.qkv.weight)
    found = []
    x = torch.randn(1, 5, 6, 8)
    with watched(Wrapped(attention), lambda block: found.extend(block.features())):
        out = attention(x)
    ((mixed, projected),) = found
    assert mixed.shape == projected.shape == (2, 30, 4)
    merged = projected.transpose(0, 1).flatten(1)
    torch.testing.assert_close(attention.proj(merged).unflatten(0, (5, 6))[None], out)


def test_only_one_image_at_a_time_and_only_own_attentions():
    with pytest.raises(ValueError, match='one image at a time, not 2'), watched(fixed(0), print):
        fixed_model = fixed(0)
        with watched(fixed_model, print):
            fixed_model(torch.randn(2, 4, 4, 8))
    with_class_token = Attention(8, 2, 'softmax')  # whose tokens are in one row
    with pytest.raises(ValueError, match='one image at a time, not 3'), watched(nn.Sequential(with_class_token), print):
        with_class_token(torch.randn(3, 7, 8), Grid(2, 3, prefix=1))
    with pytest.raises(ValueError, match='Linear has no attention'), watched(nn.Linear(2, 2), print):
        pass


def test_queries_are_sampled_and_the_whole_map_never_built():
    """64 rows of 16384 keys at a time, where the map of one head would take a gigabyte."""
    asked = []
    model = Wrapped(GlobalAttention(8, 2, 'inline')).eval()
    weights = type(model.attn.mixer).weights

    def watched_weights(self, *args, **kwargs):
        asked.append(len(kwargs['rows']))
        return weights(self, *args, **kwargs)

    model.attn.mixer.weights = watched_weights.__get__(model.attn.mixer)
    (entry,) = measured(model, torch.randn(1, 128, 128, 8), num_queries=64)
    assert entry['sampled_queries'] == 64 and entry['keys_a_window'] == 16384 and max(asked) <= 64


@pytest.mark.parametrize('number', [2, 3, 5, 100])
def test_directions_of_stripes_are_compared_at_no_more_queries(monkeypatch, number):
    """Of 8 x 16 tokens, which 3 and 5 do not divide."""
    asked = []
    query_map = inspecting.query_map
    monkeypatch.setattr(inspecting, 'query_map', lambda *args: asked.append(args[1:]) or query_map(*args))
    attention = StripeAttention(8, 2, 'softmax', 2).eval()
    measured(Wrapped(attention), torch.randn(1, 8, 16, 8), what=('ccs',), num_queries=number)
    assert 2 <= len(set(asked)) == len(asked) <= number


# --- masking ----------------------------------------------------------------------------------------------------------


def test_masked_weights_sum_to_one():
    weights = torch.rand(2, 3, 12, 12).softmax(-1)
    at = places(3, 4)
    near = measures.neighbours(at, at)
    local = masked_weights(weights, near)
    assert not local.masked_select(near).any()
    torch.testing.assert_close(local.sum(-1), torch.ones(2, 3, 12))
    others = masked_weights(weights, near, 2, torch.Generator().manual_seed(0))
    assert (others == 0).sum(-1).unique().tolist() == [2]
    assert (others.masked_select(near) > 0).all()


@pytest.mark.parametrize('mixer', ['softmax', 'inline', 'rala'])
def test_masked_attention_against_the_map(mixer):
    """Also with a class token, which has no neighbourhood, and several images."""
    attention = Attention(8, 2, mixer, grid=(4, 5)).eval()
    grid = Grid(4, 5, prefix=0 if mixer == 'rala' else 1)
    x = torch.randn(2, grid.num_tokens, 8)
    q, k, v, *gate = split_parts(attention.project(x))
    with torch.no_grad():
        weights = attention.mixer.weights(q, k, grid, grid)
        at = places(4, 5)
        near = torch.zeros(grid.num_tokens, grid.num_tokens, dtype=torch.bool)
        near[grid.prefix :, grid.prefix :] = measures.neighbours(at, at)
        mixed = masked_weights(weights, near) @ split_heads(v, 2)
        expected = merge_heads(mixed)
        if attention.mixer.context:
            kernels = attention.mixer.local_kernels(x.mean(1))
            term = torch.stack(
                [
                    add_local(
                        torch.zeros_like(v[i : i + 1]),
                        v[i : i + 1],
                        lambda image, i=i: nn.functional.conv2d(image, kernels[i][:, None], padding=1, groups=8),
                        grid,
                    )[0]
                    for i in range(2)
                ]
            )
            expected = expected + term
        expected = attention.proj(attention.apply_gate(expected, x, *gate))
    plain = attention(x, grid)
    with masked(attention, 3):
        out = attention(x, grid)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert (out - plain).abs().max() > 1e-4
    torch.testing.assert_close(attention(x, grid), plain)
    with masked(attention, 3, others=True):
        assert (attention(x, grid) - out).abs().max() > 1e-4


@pytest.mark.parametrize('conv', [None, 'grid'])
def test_what_is_masked_of_an_attention_whose_outputs_have_norm_one(conv):
    """The keys around the query, its own value among them, before the norm; the convolution stays."""
    at, grid = places(4, 5), Grid(4, 5)
    kind, options = get_mixer(dict(type='angular', conv=conv))
    mixer, near = kind(8, 2, **options), measures.neighbours(at, at)
    q, k, v = torch.randn(3, 2, 20, 8)
    with torch.no_grad():
        directions = [nn.functional.normalize(split_heads(t, 2), dim=-1) for t in (q, k)]
        weights = directions[0] @ directions[1].mT / math.pi + torch.eye(20) / 2
        whole, rest = (
            merge_heads(nn.functional.normalize(w @ split_heads(v, 2), dim=-1))
            for w in (weights, weights.masked_fill(near, 0))
        )
        plain = mixer(q.clone(), k.clone(), v, grid, grid)
        with masked(mixer, 3):
            out = mixer(q, k, v, grid, grid)
    torch.testing.assert_close(out - rest, plain - whole, rtol=1e-4, atol=1e-5)
    assert conv or (plain - whole).abs().max() < 1e-5


def test_what_is_masked_of_an_attention_that_divides_by_nothing():
    """The other keys keep the weights they have: sums of these have either sign."""
    at, grid = places(4, 5), Grid(4, 5)
    mixer, near = get_mixer('hydra')[0](8, 2), measures.neighbours(at, at)
    q, k, v = torch.randn(3, 2, 20, 8)
    unit_q, unit_k = (nn.functional.normalize(t, dim=-1) for t in (q, k))
    with masked(mixer, 3):
        out = mixer(q, k, v, grid, grid)
    expected = torch.einsum('bnc,bmc,bmc,nm->bnc', unit_q, unit_k, v, 1.0 * ~near)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('others', [False, True])
@pytest.mark.parametrize('window', [1, 3, 5, 7])
def test_which_keys_are_masked(window, others):
    """Each in its neighbourhood, or as many as a whole one outside of it; values of one head that show the weights."""
    grid, at = Grid(9, 10), places(9, 10)
    mixer = get_mixer('softmax')[0](90, 1)
    q, k, v = torch.randn(1, 90, 90), torch.randn(1, 90, 90), torch.eye(90)[None]
    with masked(mixer, window, others):
        hidden = mixer(q, k, v, grid, grid)[0] < 1e-6
    near = measures.neighbours(at, at, window // 2)
    if not others:
        assert torch.equal(hidden, near)
        return
    assert not (hidden & near).any()
    assert torch.equal(hidden.sum(dim=1), (90 - near.sum(dim=1)).clamp(max=window**2))


def test_masked_weights_have_the_bias_and_the_mask_of_the_model():
    grid, at = Grid(4, 5), places(4, 5)
    mixer = get_mixer('softmax')[0](20, 1)
    q, k, v, bias = torch.randn(1, 20, 20), torch.randn(1, 20, 20), torch.eye(20)[None], torch.randn(1, 20, 20)
    mask = (torch.arange(20) != 7)[None]
    with masked(mixer, 3):
        out = mixer(q, k, v, grid, grid, bias=bias, mask=mask)[0]
    scores = (q @ k.transpose(1, 2) * 20**-0.5 + bias)[0]
    hidden = measures.neighbours(at, at, 1) | ~mask
    torch.testing.assert_close(out, scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), rtol=1e-4, atol=1e-6)


def test_masks_go_also_where_something_fails():
    """One picture of many that cannot be looked at leaves the model as it was; no gradients meanwhile."""
    mixer, grid = get_mixer('softmax')[0](8, 2), Grid(3, 4)
    q, k, v = torch.randn(3, 1, 12, 8, requires_grad=True)
    expected = mixer(q, k, v, grid, grid)
    with pytest.raises(KeyError), masked(mixer, 3):
        assert not mixer(q, k, v, grid, grid).requires_grad
        raise KeyError
    out = mixer(q, k, v, grid, grid)
    assert out.requires_grad and torch.equal(out, expected)


@pytest.mark.parametrize('window', [0, 2, -1])
def test_windows_that_have_no_middle(window):
    with pytest.raises(ValueError, match='has to be odd and at least 1'), masked(nn.Identity(), window):
        pass


# --- plots ------------------------------------------------------------------------------------------------------------


def query_maps(maps):
    maps = np.array(maps)
    return pictures.QueryMaps('backbone.stages.2.0', 'softmax', maps, (0, 0), maps.shape[1:], np.zeros(len(maps)))


def test_the_mean_of_heads_that_see_different_keys():
    """Of crossed stripes: what one of the two directions sees is part of it, half of it; dark is what none sees."""
    nan = math.nan
    mean = query_maps([[[0.5, nan], [0.5, nan]], [[0.25, 0.75], [nan, nan]]]).mean
    np.testing.assert_allclose(mean, [[0.375, 0.375], [0.25, nan]])


@pytest.mark.parametrize('heads', [1, 3])
def test_titles_fit_on_the_plots(tmp_path, monkeypatch, heads):
    """Of few and small maps, and of a config with a long name."""
    kept = []
    monkeypatch.setattr(pictures, '_save', lambda figure, path: kept.append(figure))
    shown = np.zeros((96, 64, 3), np.uint8)
    picture = Picture('photograph_0123', shown, torch.zeros(1, 3, 96, 64), None, ((1.0, 0.0),) * 2, (64, 96))
    found = [query_maps(np.full((heads, 3, 2), 0.2))] * 2
    pictures.plot_query(found, picture, (3, 4), (3, 4), tmp_path / 'q.png', local=True)
    pictures.plot_full(
        [('backbone.blocks.0', 'softmax', np.eye(6)[None].repeat(heads, 0))], 'photograph_0123', tmp_path
    )
    entry = dict(block='backbone.blocks.0', mixer='softmax', confusion=dict(share=[0.1] * heads))
    title = 'hmhsa_pvt_v2_b1_cascade_maskrcnn_of_mine_on_shapes_3x (random weights)'
    assert pictures.plot_measures([entry], ['confusion'], tmp_path, title)
    assert len(kept) == 3
    for figure in kept:
        figure.canvas.draw()
        text = figure._suptitle or figure.axes[0].title
        assert text.get_text()
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_pixel_that_is_cropped_away_is_refused_with_what_is_kept():
    """As of a page or a tool: 2 pixels of the picture to one of the 50 x 40 that are kept of it, from x 20 on."""
    axes = (2.0, 20.0), (2.0, 0.0)
    picture = Picture('photo', np.zeros((40, 50, 3), np.uint8), torch.zeros(1, 3, 40, 50), None, axes, (140, 80))
    assert picture.to_shown(20, 0) == (0, 0) and picture.to_shown(118, 78) == (49, 39)
    for x in (10, 130):
        with pytest.raises(RunError, match='is cropped away by .*, which keeps x from 20 to 118 and y from 0 to 78.'):
            picture.to_shown(x, 40)
