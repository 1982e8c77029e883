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
from torch import nn

from mmlinattn.attention import GlobalAttention, ReducedAttention, StageContext
from mmlinattn.tooling.analysis import pictures
from mmlinattn.tooling.analysis.capture import watched
from mmlinattn.tooling.analysis.inspecting import measure_block, query_map
from mmlinattn.tooling.analysis.loading import Picture, token_at

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


def block_of(attention, x):
    found = []
    with watched(nn.ModuleDict(dict(attn=attention.eval())), found.append):
        attention(x, StageContext.of(x))
    return found[0]


def test_what_is_collected_of_a_block():
    """144 queries on 6 x 6 keys: where the token of a pixel lies and looks."""
    block = block_of(ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')), torch.randn(1, 12, 12, 8))
    maps = pictures.collect_query(block, of_size((48, 48)), 47, 5)
    assert (maps.block, maps.mixer, maps.size) == (block.name, 'softmax', (12, 12))
    np.testing.assert_array_equal(maps.maps, query_map(block, 1, 11)[0].numpy())
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
    pictures.plot_query(maps, picture, (5, 3), (10, 6.5), tmp_path / 'new' / 'q.png', local=True)
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


def lines_of(axis):
    """Label -> numbers of a line, lowest and highest number of its band at the first block."""
    found = {}
    for line, band in zip(axis.lines, axis.collections):
        heights = np.concatenate([path.vertices[path.vertices[:, 0] == 0, 1] for path in band.get_paths()])
        found[line.get_label()] = line.get_ydata(), (heights.min(), heights.max())
    return found


def test_every_line_finds_its_numbers_in_a_measured_block(figures, tmp_path):
    attention, what = GlobalAttention(8, 2, 'inline', local_kernel=3), ['ccs', 'maps', *pictures.PLOTS]
    entry = measure_block(block_of(attention, torch.randn(1, 4, 5, 8)))
    made = pictures.plot_measures([entry], what[1:], tmp_path, 'mine')
    assert made == [tmp_path / f'{name}.png' for name in what[2:]] and all(path.is_file() for path in made)
    for name, plot in pictures.PLOTS.items():
        (axis,) = figures[f'{name}.png'].axes
        assert list(lines_of(axis)) == list(plot.lines) and axis.get_ylim()[0] <= 0
        assert 'mine: ' in axis.get_title() and axis.get_ylabel() == plot.axis
        assert [text.get_text() for text in figures[f'{name}.png'].legends[0].get_texts()] == list(plot.lines)


def test_lines_are_means_of_heads_and_bands_their_ends(figures, tmp_path):
    """Of the blocks that have such numbers; a single key says nothing of entropies."""
    sharp = dict(entropy=[1, 3], entropy_if_uniform=4, top_1=[0.1, 0.2])
    dull = dict(entropy=[0], entropy_if_uniform=0, top_1=[1])
    entries = [
        dict(block='backbone.stages.0.0', mixer='rala', sharpness=sharp, ccs=None, rank=dict(state=None)),
        dict(block='backbone.stages.1.0', mixer='softmax', sharpness=dull, ccs=None),
    ]
    assert pictures.plot_measures(entries, list(pictures.PLOTS), tmp_path, 'mine') == [tmp_path / 'sharpness.png']
    (axis,) = figures['sharpness.png'].axes
    (entropy, entropy_band), (top, top_band) = lines_of(axis).values()
    np.testing.assert_allclose(entropy, (0.5, NAN))
    np.testing.assert_allclose(top, (0.15, 1))
    assert entropy_band == pytest.approx((0.25, 0.75)) and top_band == pytest.approx((0.1, 0.2))
    assert [text.get_text() for text in axis.get_xticklabels()] == ['0.0 rala', '1.0 softmax']
