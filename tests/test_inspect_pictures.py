# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the plots of inspect_attention.py show: which numbers at which places, under which words."""

import math

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

from mmlinattn.analysis import pictures
from mmlinattn.analysis.capture import watched
from mmlinattn.analysis.inspecting import query_map
from mmlinattn.analysis.loading import Picture, token_at
from mmlinattn.attention import GlobalAttention, ReducedAttention

NAN = math.nan


def of_size(shown, inputs=None, name='photo'):
    """A grey picture as shown, and what the network is given of it, padded."""
    inputs = inputs or shown
    axes, size = ((1.0, 0.0),) * 2, shown[::-1]
    return Picture(name, np.full((*shown, 3), 100, np.uint8), torch.zeros(1, 3, *inputs), None, axes, size)


@pytest.fixture
def figures(monkeypatch):
    """Path -> figure that would have been saved there."""
    kept = {}
    monkeypatch.setattr(pictures, '_save', lambda figure, path: kept.update({path.name: figure}))
    return kept


def query_maps(maps, block='backbone.stages.2.0', mixer='softmax', size=None):
    maps = np.array(maps, float)
    return pictures.QueryMaps(block, mixer, maps, (0, 0), size or maps.shape[1:], np.zeros(len(maps)))


def test_figures_are_for_files_only():
    """pyplot would keep each of them, and show it in a notebook."""
    before = pyplot.get_fignums()
    figure, axes = pictures.subplots(2, 3, figsize=(4, 5))
    assert axes.shape == (2, 3) and tuple(figure.get_size_inches()) == (4, 5)
    assert pictures.subplots(squeeze=False)[1].shape == (1, 1) and pyplot.get_fignums() == before


# --- pictures with colours --------------------------------------------------------------------------------------------


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


def test_colours_by_number():
    """Of full magnitude 85 % colour, the ends of the scale; below it the mean of the channels, made paler."""
    shown = np.broadcast_to(np.array([60, 90, 150], np.uint8), (4, 8, 3))
    drawn, _ = pictures.overlay(np.array([[2.0, -2.0]]), of_size((4, 8))._replace(shown=shown))
    grey, ends = 0.6 * 100 / 255 + 0.35, np.array([[103, 0, 31], [5, 48, 97]]) / 255
    np.testing.assert_allclose(drawn[0, [0, 7]], 0.15 * grey + 0.85 * ends, atol=1e-6)


def test_weights_lie_over_their_pixels():
    """10 x 14 pixels of 4 x 4 a token, of which the last are cut; then 9 x 13 of them shown, the rest is padding."""
    map_ = np.arange(12.0).reshape(3, 4)
    expected = map_.repeat(4, axis=0).repeat(4, axis=1)
    assert np.array_equal(pictures._over_image(map_, of_size((10, 14))), expected[:10, :14])
    assert np.array_equal(pictures._over_image(map_, of_size((9, 13), (10, 14))), expected[:9, :13])
    # two tokens, of 32 or 128 pixels, whose last is cut
    for length, stride in ((40, 32), (130, 128)):
        halves = pictures._over_image(np.array([[0.0, 1.0]]), of_size((8, length)))
        assert np.flatnonzero(halves[0])[0] == stride
    # keys of a padded map, 2 x 2 cells of 3 x 3 tokens: no stride of 2 fits, the pixels are shared out
    thirds = pictures._over_image(np.arange(3.0)[None].repeat(3, 0), of_size((12, 12)))
    assert np.array_equal(thirds[0], np.arange(3).repeat(4))
    fifths = pictures._over_image(np.arange(5.0)[None].repeat(5, 0), of_size((11, 11)))
    assert np.array_equal(fifths[0], [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


@pytest.mark.parametrize(
    ('pixel', 'shape', 'size', 'token'),
    [
        ((13, 7), (10, 14), (3, 4), (1, 3)),  # column 13, row 7, four pixels a token
        ((0, 9), (10, 14), (3, 4), (2, 0)),
        ((8, 4), (10, 14), (3, 4), (1, 2)),
        ((10, 10), (11, 11), (5, 5), (4, 4)),  # no stride fits: shared out
        ((2, 3), (11, 11), (5, 5), (1, 0)),
        ((31, 0), (32, 32), (1, 1), (0, 0)),
        ((31, 32), (40, 40), (2, 2), (1, 0)),
        ((127, 128), (130, 130), (2, 2), (1, 0)),
    ],
)
def test_the_token_of_a_pixel(pixel, shape, size, token):
    assert token_at(*pixel, torch.zeros(1, 3, *shape), size) == token


def test_which_are_shown_of_many():
    assert pictures.picked(10, 4) == [0, 3, 6, 9]
    assert pictures.picked(12, 8) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert pictures.picked(3, 8) == [0, 1, 2] and pictures.picked(1, 8) == [0]


# --- maps -------------------------------------------------------------------------------------------------------------


def test_what_is_collected_of_a_block():
    """144 queries on 6 x 6 keys: where the token of a pixel lies and looks; of a whole map at most 128 a side."""
    found = []
    attention = nn.ModuleDict(dict(attn=ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')))).eval()
    with watched(attention, found.append):
        attention['attn'](torch.randn(1, 12, 12, 8))
    (block,) = found
    maps = pictures.collect_query(block, of_size((48, 48)), 47, 5)
    assert (maps.block, maps.mixer, maps.token, maps.size) == (block.name, 'softmax', (1, 11), (12, 12))
    weights, classes = query_map(block, 1, 11)
    np.testing.assert_array_equal(maps.maps, weights.numpy())
    np.testing.assert_array_equal(maps.classes, classes.numpy())
    assert maps.maps.shape == (2, 6, 6) and maps.classes.shape == (2,)
    assert pictures.collect_full(block).shape == (2, 72, 36)  # every second query, every key
    assert pictures.collect_full(block, 12).shape == (2, 12, 12)
    # of a whole map the attention alone, without the convolution of the values
    attention = nn.ModuleDict(dict(attn=GlobalAttention(8, 2, 'inline'))).eval()
    with watched(attention, found.append):
        attention['attn'](torch.randn(1, 3, 4, 8))
    (call,) = found[1].calls
    np.testing.assert_allclose(pictures.collect_full(found[1]), call.weights(0, torch.arange(12)), atol=1e-6)
    maps = [pictures.collect_query(found[1], of_size((12, 16)), 5, 9, local).maps for local in (False, True)]
    for map_, local in zip(maps, (False, True)):
        np.testing.assert_allclose(map_.reshape(2, 12), call.weights(0, torch.tensor([9]), local)[:, 0], atol=1e-6)
    assert np.abs(maps[0] - maps[1]).max() > 1e-3


def texts(axes):
    return [axis.get_title() for axis in axes if axis.get_visible()]


def test_maps_of_a_query(figures, tmp_path):
    """Two blocks of two heads and one, the second on reduced keys."""
    picture = of_size((8, 16))
    maps = [
        query_maps([[[0.5, 0.25, 0.25, NAN]] * 2, [[0.125, 0.125, 0.5, NAN]] * 2], 'backbone.stages.0.0', 'inline'),
        query_maps([[[0.75, -0.25]]], 'backbone.stages.1.0', size=(2, 4)),
    ]
    pictures.plot_query(maps, picture, (5, 3), (10, 6.5), tmp_path / 'q.png')
    figure = figures['q.png']
    assert len(figure.axes) == 8  # the picture, the mean, two heads
    first, second = figure.axes[:4], figure.axes[4:]
    assert texts(first) == ['picture and query', 'mean of heads, max 0.38', 'head 0, max 0.5', 'head 1, max 0.5']
    assert texts(second) == ['picture and query', 'mean of heads, max 0.75', 'head 0, max 0.75']
    assert first[0].get_ylabel() == 'backbone.stages.0.0\ninline, 2x4\nall keys alike: 0.17'  # six keys
    assert second[0].get_ylabel() == 'backbone.stages.1.0\nsoftmax, 2x4\nall keys alike: 0.5'
    panels = [(first[1], maps[0].mean), (first[2], maps[0].maps[0]), (first[3], maps[0].maps[1])]
    for axis, map_ in [*panels, (second[2], maps[1].maps[0])]:
        np.testing.assert_allclose(axis.images[0].get_array(), pictures.overlay(map_, picture)[0])
    assert np.array_equal(first[0].images[0].get_array(), picture.shown)
    for axis in (*first, *second[:3]):
        (mark,) = axis.lines
        assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (5, 3) and mark.get_marker() == '+'
        assert not len(axis.get_xticks()) and not len(axis.get_yticks())
    title = figure._suptitle.get_text()
    assert title.startswith('photo: where the token at pixel 10, 6.5 [+] looks, attention weights\n')
    assert 'red: positive, blue: negative' in title
    assert all(axis.images[0].get_interpolation() == 'nearest' for axis in first[1:])
    # panels of 1.7 inches, as high as the picture is; no narrower than its title
    assert figure.get_size_inches() == pytest.approx((7.5, 2 * (1.7 / 2 + 0.35) + 0.9))
    pictures.plot_query(maps[1:], of_size((16, 8)), (5, 3), (10, 6.5), tmp_path / 'high.png')
    assert figures['high.png'].get_size_inches() == pytest.approx((7.5, 1.7 * 2 + 0.35 + 0.9))
    pictures.plot_query(maps[::-1], picture, (5, 3), (10, 6.5), tmp_path / 'turned.png')
    assert len(figures['turned.png'].axes) == 8
    pictures.plot_query(maps, picture, (5, 3), (10, 6.5), tmp_path / 'local.png', local=True)
    title = figures['local.png']._suptitle.get_text().splitlines()[0]
    assert title.endswith('looks, with the convolutions of the values (mean over channels)')


def test_full_maps(figures, tmp_path):
    """Full colour at the magnitude that half a percent of the weights exceed; grey where a query cannot look."""
    weights = np.linspace(-0.4, 0.2, 201).reshape(1, 3, 67).repeat(2, 0)
    weights[1] = 0
    weights[1, 0, 0] = NAN
    pictures.plot_full([('stages.0.0', 'rala', weights), ('stages.1.0', 'hydra', weights[:1])], 'photo', tmp_path / 'f')
    figure = figures['f']
    first, second, third, hidden = figure.axes
    assert [axis.get_visible() for axis in figure.axes] == [True, True, True, False]
    (image,) = first.images
    assert image.get_clim() == pytest.approx((-0.397, 0.397), abs=1e-6) and image.get_cmap().name == 'RdBu_r'
    assert np.array_equal(image.get_array(), weights[0])
    assert second.images[0].get_clim() == (-1, 1)  # nothing but zeros
    assert texts(figure.axes) == ['head 0, ±0.4', 'head 1, ±1', 'head 0, ±0.4']
    assert first.get_ylabel() == 'stages.0.0\nrala\nqueries ↓  keys →'
    assert third.get_ylabel() == 'stages.1.0\nhydra\nqueries ↓  keys →'
    assert first.get_facecolor() == (0.85, 0.85, 0.85, 1)
    assert figure.get_size_inches() == pytest.approx((7.5, 2 * 1.6 + 0.9))
    pictures.plot_full([('a', 'hydra', weights[:1]), ('b', 'rala', weights)], 'photo', tmp_path / 'more heads below')
    assert [axis.get_visible() for axis in figures['more heads below'].axes] == [True, False, True, True]
    many = [(f'stages.0.{i}', 'rala', np.zeros((8, 3, 3))) for i in range(3)]
    pictures.plot_full(many, 'photo', tmp_path / 'many')
    assert figures['many'].get_size_inches() == pytest.approx((8 * 1.5 + 1, 3 * 1.6 + 0.9))
    title = figure._suptitle.get_text()
    assert title.startswith('photo: weights of every query (rows) on every key (columns)') and 'blue: neg' in title


class Panel:
    """Stands for an axis: keeps its title and label, takes whatever else is drawn."""

    title = label = None

    def set_title(self, text, **_):
        self.title = text.split(',')[0]

    def set_ylabel(self, text, **_):
        self.label = text.split('\n')[0]

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_at_most_twelve_blocks_and_eight_heads_are_drawn(monkeypatch, tmp_path):
    made = []

    def subplots(rows, columns, **_):
        made.append([[Panel() for _ in range(columns)] for _ in range(rows)])
        return Panel(), made[-1]

    monkeypatch.setattr(pictures, 'subplots', subplots)
    heads = [f'head {i}' for i in (0, 2, 3, 5, 6, 8, 9, 11)]
    blocks = [f'block{i}' for i in (0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13)]
    many = [query_maps(np.full((12, 2, 2), 0.25), f'block{i}') for i in range(14)]
    pictures.plot_query(many, of_size((4, 4)), (0, 0), (0, 0), tmp_path)
    pictures.plot_full([(f'block{i}', 'rala', np.zeros((12, 3, 3))) for i in range(14)], 'photo', tmp_path)
    for axes, first in zip(made, (['picture and query', 'mean of heads'], [])):
        assert [row[0].label for row in axes] == blocks
        assert all([axis.title for axis in row] == [*first, *heads] for row in axes)


# --- measures by block ------------------------------------------------------------------------------------------------


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
# measure -> its lines: label, mean of the heads in both blocks, lowest and highest head of the first
DRAWN = dict(
    rank={
        'state of keys and values': ((0.375, NAN), (0.25, 0.5)),
        'output of the attention': ((0.15, 0.5), (0.1, 0.2)),
        'with convolution and gate, before the output projection': ((0.5, NAN), (0.5, 0.5)),
        'weights of the sampled queries': ((0.375, 1), (0.25, 0.5)),
        'weights with the convolutions of the values': ((1, NAN), (1, 1)),
    },
    confusion={'confused pairs within a window': ((50, 0), (25, 95))},
    locality={
        'sum of weights, attention': ((0.4, NAN), (0.3, 0.5)),
        'share of magnitudes, attention': ((0.3, NAN), (0.2, 0.4)),
        'share of magnitudes, with the convolutions of the values': ((0.8, NAN), (0.7, 0.9)),
        'all keys alike (9 / number of keys, fewer at the border)': ((0.1, NAN), (0.1, 0.1)),
    },
    sharpness={
        'entropy / log(number of keys); 1: all keys alike': ((0.5, NAN), (0.25, 0.75)),
        'mass of the 1 strongest key(s)': ((0.15, 1), (0.1, 0.2)),
        'mass of the 9 strongest key(s)': ((0.4, 1), (0.3, 0.5)),
        'mass of the 25 strongest key(s)': ((0.8, 1), (0.6, 1)),
        'negative share of the magnitude': ((0.25, 0), (0, 0.5)),
    },
    ccs={"mean over pairs of heads' maps": ((0.5, NAN), (0.5, 0.5))},
)
WORDS = dict(  # of the title, of the axis, and the lowest value on it
    rank=('effective rank of state, output and weights', 'effective rank / largest possible', 0),
    confusion=('confused pairs of queries (weights closer than 1e-3 in L2)', 'share of pairs, %', 0),
    locality=('weight inside the 3x3 around the query', 'weight', None),
    sharpness=('how sharp the weights of a query are', 'share', -0.02),
    ccs=('similarity of the heads of a block (blocks with one head are left out)', 'cosine similarity', None),
)


def test_lines_of_every_measure(figures, tmp_path):
    what = ['ccs', 'maps', 'rank', 'confusion', 'locality', 'sharpness']
    made = pictures.plot_measures(ENTRIES, what, tmp_path, 'mine')
    assert made == [tmp_path / f'{name}.png' for name in what if name != 'maps'] and len(figures) == 5
    for name, lines in DRAWN.items():
        figure = figures[f'{name}.png']
        (axis,) = figure.axes
        drawn = {line.get_label(): line for line in axis.lines if line.get_label() != 'full rank'}
        assert list(drawn) == list(lines)
        bands = axis.collections
        for band, (label, (means, (low, high))) in zip(bands, lines.items()):
            np.testing.assert_allclose(drawn[label].get_ydata(), means, err_msg=label)
            assert drawn[label].get_xdata().tolist() == [0, 1]
            heights = np.concatenate([path.vertices[path.vertices[:, 0] == 0, 1] for path in band.get_paths()])
            assert (heights.min(), heights.max()) == pytest.approx((low, high)), label
            assert np.allclose(band.get_facecolor()[0, :3], pictures_colour(drawn[label]))
        words, label, lowest = WORDS[name]
        title = ' '.join(axis.get_title().split())
        assert title.startswith(f'mine: {words}') and axis.get_ylabel() == label
        assert name == 'ccs' or title.endswith('lines: mean over heads, bands: lowest and highest head')
        assert lowest is None or axis.get_ylim()[0] == lowest
        assert [text.get_text() for text in axis.get_xticklabels()] == ['0.0 rala', '1.0 softmax']
        assert axis.get_xlabel() == 'block and its attention, input to output'
        (legend,) = figure.legends
        assert set(lines) <= {text.get_text() for text in legend.get_texts()}
    (full,) = (line for line in figures['rank.png'].axes[0].lines if line.get_label() == 'full rank')
    assert set(full.get_ydata()) == {1} and figures['rank.png'].axes[0].get_ylim() == (0, 1.05)
    assert figures['sharpness.png'].axes[0].get_ylim() == (-0.02, 1.05)


def test_lines_are_told_apart(figures, tmp_path):
    """Full for sums of the attention, dotted for its shares, dashed for what is not of it alone; black: all alike."""
    pictures.plot_measures(ENTRIES, list(DRAWN), tmp_path, 'mine')
    for name, styles in dict(rank='-----', confusion='-', locality='- : -- -', sharpness='- - - - --', ccs='-').items():
        drawn = [line for line in figures[f'{name}.png'].axes[0].lines if line.get_label() != 'full rank']
        styles = styles.split() if ' ' in styles else list(styles)
        assert [line.get_linestyle() for line in drawn] == styles, name
    alike = figures['locality.png'].axes[0].lines[3]
    assert pictures_colour(alike) == (0, 0, 0)
    labels = {text.get_text() for text in figures['rank.png'].legends[0].get_texts()}
    assert labels == {*DRAWN['rank'], 'full rank'}


def test_many_blocks_have_room(figures, tmp_path):
    pictures.plot_measures(ENTRIES[:1] * 30, ['ccs'], tmp_path, 'mine')
    assert figures['ccs.png'].get_size_inches()[0] == pytest.approx(30 * 0.42 + 2)


def pictures_colour(line):
    from matplotlib.colors import to_rgb

    return to_rgb(line.get_color())


def test_measures_that_no_block_has_are_left_out(figures, tmp_path):
    entries = [dict(block='backbone.blocks.0', mixer='softmax', ccs=None, rank=dict(state=None))]
    assert pictures.plot_measures(entries, list(DRAWN), tmp_path, 'mine') == [] and not figures
    assert pictures.plot_measures(ENTRIES, ['ccs'], tmp_path, 'mine') == [tmp_path / 'ccs.png']
    # of locality, what only the convolutions have is left out of the plot, not the plot
    entry = {**ENTRIES[0], 'locality': dict(sum=[0.5], share=[0.2], if_uniform=0.1)}
    assert pictures.plot_measures([entry], ['locality'], tmp_path, 'mine')
    assert len(figures['locality.png'].axes[0].lines) == 3
    # of ranks, any that was measured is drawn
    for kind, label in zip(ENTRIES[0]['rank'], DRAWN['rank']):
        entry = {**ENTRIES[0], 'rank': {kind: ENTRIES[0]['rank'][kind]}}
        assert pictures.plot_measures([entry], ['rank'], tmp_path, 'mine')
        assert [line.get_label() for line in figures['rank.png'].axes[0].lines] == [label, 'full rank']


def test_bars_of_masked_accuracies(figures, tmp_path):
    accuracies = {'none': 80.0, '3x3': 60.25, '9 others': 79.0, '5x5': 50.0, '25 others': 78.5}
    pictures.plot_masking(accuracies, tmp_path / 'm.png', 'mine')
    (axis,) = figures['m.png'].axes
    assert [bar.get_height() for bar in axis.patches] == [80, 60.25, 79, 50, 78.5]
    assert [text.get_text() for text in axis.texts] == ['80.0', '60.2', '79.0', '50.0', '78.5']
    assert [text.get_text() for text in axis.get_xticklabels()] == list(accuracies)
    grey, *colours = (bar.get_facecolor()[:3] for bar in axis.patches)
    assert len(set(grey)) == 1 and len(colours) == 4
    for red, blue in (colours[:2], colours[2:]):
        assert red[0] > max(red[1:]) and blue[2] > max(blue[:2])
    assert axis.get_ylabel() == 'top-1 accuracy, %' and 'red: around it, blue: random others' in axis.get_xlabel()
    assert axis.get_title() == 'mine: accuracy with masked attention weights (InLine Tab. 2)'
    pictures.plot_masking(accuracies, tmp_path / 'm.png', 'mine', source='elsewhere')
    assert figures['m.png'].axes[0].get_title() == 'mine: accuracy with masked attention weights (elsewhere)'


def test_files_are_written_into_new_folders(tmp_path):
    path = tmp_path / 'new' / 'deep' / 'm.png'
    pictures.plot_masking({'none': 80.0}, path, 'mine', source='somewhere')
    from PIL import Image

    with Image.open(path) as image:
        assert image.format == 'PNG' and image.size == (660, 396)  # 6 x 3.6 inches
