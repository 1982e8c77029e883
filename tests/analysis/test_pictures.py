# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the plots show: which numbers at which places."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from mmlinattn.analysis import pictures
from mmlinattn.analysis.capture import watched
from mmlinattn.analysis.inspecting import query_map
from mmlinattn.analysis.loading import Picture, token_at
from mmlinattn.attention import ReducedAttention

NAN = math.nan


def of_size(shown, inputs=None):
    """A grey image as shown, and what the network is given of it, padded."""
    inputs = torch.zeros(1, 3, *(inputs or shown))
    return Picture('photo', np.full((*shown, 3), 100, np.uint8), inputs, None, ((1.0, 0.0),) * 2, shown[::-1])


def query_maps(maps, block='stages.2.0', mixer='softmax', size=None):
    maps = np.array(maps, float)
    return pictures.QueryMaps(block, mixer, maps, size or maps.shape[1:])


@pytest.fixture
def figures(monkeypatch):
    """Name -> figure, which is saved as well."""
    kept, save, open_before = {}, Figure.savefig, pyplot.get_fignums()

    def savefig(self, path, **options):
        kept[path.name] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, 'savefig', savefig)
    yield kept
    assert pyplot.get_fignums() == open_before  # pyplot would keep each of them, and show it in a notebook


def test_colours_of_weights():
    """Red and blue for the signs, by magnitude; grey where there is nothing, dark where the query cannot look."""
    drawn, peak = pictures.overlay(np.array([[0.2, -0.4], [0.0, NAN]]), of_size((8, 8)))
    assert peak == pytest.approx(0.4) and drawn.shape == (8, 8, 3) and 0 <= drawn.min() <= drawn.max() <= 1
    grey = 100 / 255 * 0.6 + 0.35
    half_red, full_blue, nothing, blind = drawn[0, 0], drawn[0, 7], drawn[7, 0], drawn[7, 7]
    assert half_red[0] > grey > half_red[2] and full_blue[2] > full_blue[0] and full_blue[0] < half_red[2]
    np.testing.assert_allclose(nothing, [grey] * 3, atol=0.01)
    np.testing.assert_allclose(blind, [0.35 * grey] * 3, atol=0.01)
    assert np.array_equal(drawn[:4, :4], np.broadcast_to(half_red, (4, 4, 3)))
    for map_, level in ((np.zeros((2, 2)), grey), (np.full((2, 2), NAN), 0.35 * grey)):
        drawn, peak = pictures.overlay(map_, of_size((8, 8)))
        assert peak == 0
        np.testing.assert_allclose(drawn, level, atol=0.01)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(8, 140), st.integers(8, 140), st.sampled_from([4, 8, 16, 32]), st.data())
def test_weights_lie_over_the_pixels_of_their_tokens(height, width, stride, data):
    """Of the token that a pixel belongs to; padding is cut off, the last token may reach over the border."""
    size = -(-height // stride), -(-width // stride)
    shown = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    picture = of_size(shown, (height, width))
    at = data.draw(st.tuples(*(st.integers(0, side - 1) for side in shown)))
    token = token_at(*at[::-1], picture.inputs, size)
    assert token == (at[0] // stride, at[1] // stride)
    map_ = np.zeros(size)
    map_[token] = 1
    drawn, peak = pictures.overlay(map_, picture)
    assert peak == 1 and drawn.shape == (*shown, 3)
    red = drawn[..., 0] > drawn[..., 2] + 0.1
    expected = np.zeros(shown, bool)
    expected[tuple(slice(t * stride, (t + 1) * stride) for t in token)] = True
    assert np.array_equal(red, expected)


def test_maps_that_no_stride_fits_share_the_pixels_out():
    picture = of_size((11, 11))
    assert [token_at(x, 0, picture.inputs, (5, 5))[1] for x in range(11)] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    drawn, _ = pictures.overlay(np.eye(5)[:1].repeat(5, 0), picture)
    assert (drawn[0, :, 0] > drawn[0, :, 2] + 0.1).tolist() == [True] * 3 + [False] * 8


def test_what_is_collected_of_a_block():
    """144 queries on 6 x 6 keys: where the token of a pixel lies and looks."""
    found = []
    attention = nn.ModuleDict(dict(attn=ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')))).eval()
    with watched(attention, found.append):
        attention['attn'](torch.randn(1, 12, 12, 8))
    maps = pictures.collect_query(found[0], of_size((48, 48)), 47, 5)
    assert (maps.block, maps.mixer, maps.size) == (found[0].name, 'softmax', (12, 12))
    np.testing.assert_array_equal(maps.maps, query_map(found[0], 1, 11)[0].numpy())
    # heads that cannot look give nothing; nobody can look at the last
    maps = query_maps([[[0.5, NAN, NAN]], [[0.25, 0.5, NAN]]])
    np.testing.assert_array_equal(maps.mean, [[0.375, 0.25, NAN]])


def test_maps_of_a_query(figures, tmp_path):
    """Two blocks of two heads and one, the second on reduced keys."""
    picture = of_size((8, 16))
    maps = [
        query_maps([[[0.5, 0.25, 0.25, NAN]] * 2, [[0.125, 0.125, 0.5, NAN]] * 2], 'stages.0.0', 'inline'),
        query_maps([[[0.75, -0.25]]], 'stages.1.0', size=(2, 4)),
    ]
    pictures.plot_query(maps, picture, (5, 3), (10, 6.5), tmp_path / 'new' / 'deep' / 'q.png', local=True)
    with Image.open(tmp_path / 'new' / 'deep' / 'q.png') as image:
        assert image.format == 'PNG'
    figure = figures['q.png']
    first, second = figure.axes[:4], figure.axes[4:]
    assert [axis.get_visible() for axis in figure.axes] == [True] * 7 + [False]
    assert [axis.get_title() for axis in first[1:]] == [
        *('mean of heads, max 0.38', 'head 0, max 0.5', 'head 1, max 0.5'),
    ]
    assert 'stages.0.0\ninline, 2x4\nall keys alike: 0.17' == first[0].get_ylabel()  # six keys
    assert second[0].get_ylabel() == 'stages.1.0\nsoftmax, 2x4\nall keys alike: 0.5'
    panels = [(first[1], maps[0].mean), (first[3], maps[0].maps[1]), (second[2], maps[1].maps[0])]
    for axis, map_ in panels:
        np.testing.assert_allclose(axis.images[0].get_array(), pictures.overlay(map_, picture)[0])
    assert np.array_equal(first[0].images[0].get_array(), picture.shown)
    for axis in figure.axes[:7]:
        assert (axis.lines[0].get_xdata()[0], axis.lines[0].get_ydata()[0]) == (5, 3)
    title = figure._suptitle.get_text()
    assert 'photo' in title and '10, 6.5' in title and 'with the convolutions of the values' in title


def test_full_maps(figures, tmp_path):
    """Full colour at the magnitude that half a percent of the weights exceed; grey where a query cannot look."""
    weights = np.linspace(-0.4, 0.2, 201).reshape(1, 3, 67).repeat(2, 0)
    weights[1] = 0
    weights[1, 0, 0] = NAN
    pictures.plot_full([('stages.0.0', 'rala', weights), ('stages.1.0', 'hydra', weights[:1])], 'p', tmp_path / 'f.png')
    axes = figures['f.png'].axes
    assert [axis.get_visible() for axis in axes] == [True, True, True, False]
    assert axes[0].images[0].get_clim() == pytest.approx((-0.397, 0.397), abs=1e-6)
    assert np.array_equal(axes[0].images[0].get_array(), weights[0])
    assert axes[1].images[0].get_clim() == (-1, 1)  # nothing but zeros
    assert axes[2].get_ylabel().startswith('stages.1.0\nhydra')


def test_at_most_twelve_blocks_and_eight_heads_are_drawn(figures, tmp_path):
    """Evenly spread ones, each named."""
    pictures.plot_full([(f'block{i}', 'rala', np.zeros((12, 3, 3))) for i in range(14)], 'p', tmp_path / 'full.png')
    many = [query_maps(np.full((12, 2, 2), 0.25), f'block{i}') for i in range(3)]
    pictures.plot_query(many, of_size((4, 4)), (0, 0), (0, 0), tmp_path / 'query.png')
    heads = [f'head {i}' for i in (0, 2, 3, 5, 6, 8, 9, 11)]
    for name, columns in (('full.png', 8), ('query.png', 10)):
        axes = figures[name].axes
        assert [axis.get_title().split(',')[0] for axis in axes[columns - 8 : columns]] == heads
    blocks = [axis.get_ylabel().split('\n')[0] for axis in figures['full.png'].axes[::8]]
    assert blocks == [f'block{i}' for i in (0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13)]


def rank(effective, at_most):
    return dict(effective=effective, at_most=at_most)


ENTRIES = [
    dict(
        block='backbone.stages.0.0',
        mixer='rala',
        rank=dict(
            state=rank([2, 4], 8),
            output=rank([1, 2], 10),
            projected=rank([5, 5], 10),
            weights=rank([3, 6], 12),
            weights_with_local=rank([12, 12], 12),
        ),
        confusion=dict(share=[0.25, 0.3, 0.95]),
        locality=dict(sum=[0.5, 0.3], share=[0.2, 0.4], share_with_local=[0.9, 0.7], if_uniform=0.1),
        sharpness=dict(
            entropy=[1, 3], entropy_if_uniform=4, top_1=[0.1, 0.2], top_9=[0.3, 0.5], top_25=[0.6, 1], negative=[0, 0.5]
        ),
        ccs=0.5,
    ),
    dict(
        block='backbone.stages.1.0',
        mixer='softmax',
        rank=dict(output=rank([4], 8), weights=rank([6], 6)),
        confusion=dict(share=[0]),
        sharpness=dict(entropy=[0], entropy_if_uniform=0, top_1=[1], top_9=[1], top_25=[1], negative=[0]),
        ccs=None,
    ),
]
# measure -> of its lines the mean of the heads in both blocks, lowest and highest head of the first
DRAWN = dict(
    rank=[
        ((0.375, NAN), (0.25, 0.5)),
        ((0.15, 0.5), (0.1, 0.2)),
        ((0.5, NAN), (0.5, 0.5)),
        ((0.375, 1), (0.25, 0.5)),
        ((1, NAN), (1, 1)),
    ],
    confusion=[((0.5, 0), (0.25, 0.95))],
    locality=[((0.4, NAN), (0.3, 0.5)), ((0.3, NAN), (0.2, 0.4)), ((0.8, NAN), (0.7, 0.9)), ((0.1, NAN), (0.1, 0.1))],
    sharpness=[
        ((0.5, NAN), (0.25, 0.75)),
        ((0.15, 1), (0.1, 0.2)),
        ((0.4, 1), (0.3, 0.5)),
        ((0.8, 1), (0.6, 1)),
        ((0.25, 0), (0, 0.5)),
    ],
    ccs=[((0.5, NAN), (0.5, 0.5))],
)


def test_lines_of_every_measure(figures, tmp_path):
    what = ['ccs', 'maps', 'rank', 'confusion', 'locality', 'sharpness']
    made = pictures.plot_measures(ENTRIES, what, tmp_path, 'mine')
    assert made == [tmp_path / f'{name}.png' for name in what if name != 'maps'] and all(p.is_file() for p in made)
    for name, lines in DRAWN.items():
        (axis,) = figures[f'{name}.png'].axes
        for line, band, (means, ends) in zip(axis.lines, axis.collections, lines):
            np.testing.assert_allclose(line.get_ydata(), means, err_msg=f'{name}: {line.get_label()}')
            heights = np.concatenate([path.vertices[path.vertices[:, 0] == 0, 1] for path in band.get_paths()])
            assert (heights.min(), heights.max()) == pytest.approx(ends), line.get_label()
        assert len(axis.lines) == len(axis.collections) == len(lines) == len({line.get_color() for line in axis.lines})
        assert 'mine: ' in axis.get_title() and axis.get_ylabel()
        assert [text.get_text() for text in axis.get_xticklabels()] == ['0.0 rala', '1.0 softmax']
        (legend,) = figures[f'{name}.png'].legends
        assert [text.get_text() for text in legend.get_texts()] == [line.get_label() for line in axis.lines]
    assert figures['confusion.png'].axes[0].get_ylim()[0] == 0


def test_measures_that_no_block_has_are_left_out(figures, tmp_path):
    entries = [dict(block='backbone.blocks.0', mixer='softmax', ccs=None, rank=dict(state=None))]
    assert pictures.plot_measures(entries, list(DRAWN), tmp_path, 'mine') == [] and not figures
    # of locality, what only the convolutions have is left out of the plot, not the plot
    entry = {**ENTRIES[0], 'locality': dict(sum=[0.5], share=[0.2], if_uniform=0.1)}
    assert pictures.plot_measures([entry], ['locality'], tmp_path, 'mine')
    assert len(figures['locality.png'].axes[0].lines) == 3
