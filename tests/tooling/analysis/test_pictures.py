# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Pixels of tokens, and plots of all measures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_inspecting import block_of

from mmlinattn.attention import GlobalAttention
from mmlinattn.tooling.analysis import pictures
from mmlinattn.tooling.analysis.inspecting import measure_block, query_map
from mmlinattn.tooling.analysis.loading import Picture, token_at


def of_size(shown, inputs=None):
    inputs = torch.zeros(1, 3, *(inputs or shown))
    return Picture('photo', np.full((*shown, 3), 100, np.uint8), inputs, None, np.asarray, shown[::-1])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(8, 140), st.integers(8, 140), st.sampled_from([4, 8, 16, 32]), st.data())
def test_weights_lie_over_the_pixels_of_their_tokens(height, width, stride, data):
    """Draw one token with all the weight. Padding is cropped; the last token may extend beyond the border."""
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
    expected = np.zeros(shown, bool)
    expected[tuple(slice(t * stride, (t + 1) * stride) for t in token)] = True
    assert np.array_equal(drawn[..., 0] > drawn[..., 2] + 0.1, expected)


def test_plots_of_the_measures_of_a_block(tmp_path):
    block = block_of(GlobalAttention(8, 2, 'inline'), torch.randn(1, 12, 12, 8))
    maps = pictures.collect_query(block, of_size((48, 48)), 47, 5)
    np.testing.assert_array_equal(maps.maps, query_map(block, 1, 11)[0].numpy())
    entry = measure_block(block)
    made = pictures.plot_measures([entry], ['maps', *pictures.PLOTS], tmp_path / 'new', 'mine')
    assert made == [tmp_path / 'new' / f'{name}.png' for name in pictures.PLOTS] and all(map(Path.is_file, made))
    assert all(
        np.isfinite(pictures.values_of(line, entry)).all() for _, lines in pictures.PLOTS.values() for line in lines
    )
    assert pictures.plot_measures([dict(block='a', mixer='rala', ccs=None)], ['ccs'], tmp_path, 'mine') == []


def test_plots_begin_at_zero_or_at_the_lowest_value(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, '_save', lambda figure, path: figures.append(figure))
    for value in (0.5, -0.5):
        pictures.plot_measures([dict(block='a', mixer='rala', ccs=value)], ['ccs'], tmp_path, 'mine')
    first, second = (figure.axes[0].get_ylim()[0] for figure in figures)
    assert first == 0 and second <= -0.5


@pytest.mark.parametrize('blocks', [1, 3])
def test_rows_of_a_query_plot_have_the_shape_of_the_image(tmp_path, blocks):
    """Each block adds a row, in inches, to the height of a plot at 110 dots per inch."""
    maps = pictures.QueryMaps('a', 'softmax', np.full((2, 4, 8), 1 / 32), (4, 8))
    pictures.plot_query([maps] * blocks, of_size((32, 64)), (3, 1), (3, 1), tmp_path / 'query.png')
    row = 1.7 * 32 / 64 + 0.35
    assert abs(Image.open(tmp_path / 'query.png').height - 110 * (row * blocks + 0.9)) <= 1


def test_numbers_of_lines():
    maps = pictures.QueryMaps('a', 'softmax', np.array([[[0.5, np.nan, np.nan]], [[0.25, 0.5, np.nan]]]), (1, 3))
    np.testing.assert_array_equal(maps.mean, [[0.375, 0.25, np.nan]])
    entry = dict(sharpness=dict(entropy=[1, 3], log=4, zero=0), rank=dict(state=None), ccs=0.0)
    for line, expected in (
        ('sharpness.entropy / log', [0.25, 0.75]),
        ('sharpness.entropy / zero', [np.nan]),
        ('ccs', [0.0]),
        ('rank.state.effective / at_most', [np.nan]),
    ):
        np.testing.assert_array_equal(pictures.values_of(line, entry), expected)
    assert pictures.evenly_spaced(3, 8) == [0, 1, 2] and pictures.evenly_spaced(9, 3) == [0, 4, 8]
