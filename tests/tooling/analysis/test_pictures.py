# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Weights lie over the pixels of their tokens; numbers of blocks are found; files are images."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inspecting import block_of

from mmlinattn.attention import GlobalAttention
from mmlinattn.tooling.analysis import pictures
from mmlinattn.tooling.analysis.inspecting import measure_block, query_map
from mmlinattn.tooling.analysis.loading import Picture, token_at


def of_size(shown, inputs=None):
    """A grey image as shown, and what the network is given of it, padded."""
    inputs = torch.zeros(1, 3, *(inputs or shown))
    return Picture('photo', np.full((*shown, 3), 100, np.uint8), inputs, None, np.asarray, shown[::-1])


def test_colours_of_weights():
    """Red and blue for the signs, by magnitude; grey where there is nothing, dark where the query cannot look."""
    drawn, peak = pictures.overlay(np.array([[0.2, -0.4], [0.0, math.nan]]), of_size((8, 8)))
    grey = 100 / 255 * 0.6 + 0.35
    half_red, full_blue, nothing, blind = drawn[0, 0], drawn[0, 7], drawn[7, 0], drawn[7, 7]
    assert peak == pytest.approx(0.4) and 0 <= drawn.min() <= drawn.max() <= 1
    assert half_red[0] > grey > half_red[2] and full_blue[2] > full_blue[0] and full_blue[0] < half_red[2]
    np.testing.assert_allclose(nothing, [grey] * 3, atol=0.01)
    np.testing.assert_allclose(blind, [0.35 * grey] * 3, atol=0.01)
    assert pictures.overlay(np.full((2, 2), math.nan), of_size((8, 8)))[1] == 0


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
    expected = np.zeros(shown, bool)
    expected[tuple(slice(t * stride, (t + 1) * stride) for t in token)] = True
    assert np.array_equal(drawn[..., 0] > drawn[..., 2] + 0.1, expected)


def test_plots_are_of_what_a_block_has(tmp_path):
    """Of each measure; every line finds its numbers."""
    block = block_of(GlobalAttention(8, 2, 'inline'), torch.randn(1, 12, 12, 8))
    maps = pictures.collect_query(block, of_size((48, 48)), 47, 5)
    np.testing.assert_array_equal(maps.maps, query_map(block, 1, 11)[0].numpy())
    entry = measure_block(block)
    made = pictures.plot_measures([entry], ['maps', *pictures.PLOTS], tmp_path / 'new', 'mine')
    assert made == [tmp_path / 'new' / f'{name}.png' for name in pictures.PLOTS] and all(map(Path.is_file, made))
    for _, places in pictures.PLOTS.values():
        assert all(np.isfinite(pictures.numbers_at(entry, place)).all() for place in places)
    assert pictures.plot_measures([dict(block='a', mixer='rala', ccs=None)], ['ccs'], tmp_path, 'mine') == []


def test_panels_are_of_the_heads_that_they_name(tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr(pictures, '_plot_grid', lambda found, *_: rows.extend(found))
    maps = pictures.QueryMaps('a', 'softmax', np.array([[[1, 0]], [[0.5, 0.25]]]), (1, 2))
    pictures.plot_query([maps], of_size((8, 16)), (0, 0), (0, 0), tmp_path / 'q.png')
    (_, panels), *_ = rows
    assert [panel[0] for panel in panels[1:]] == ['mean of heads, max 0.75', 'head 0, max 1', 'head 1, max 0.5']


def test_numbers_of_lines():
    """Heads that cannot look give nothing to the mean; a single key says nothing of entropies."""
    maps = pictures.QueryMaps('a', 'softmax', np.array([[[0.5, math.nan, math.nan]], [[0.25, 0.5, math.nan]]]), (1, 3))
    np.testing.assert_array_equal(maps.mean, [[0.375, 0.25, math.nan]])
    entry = dict(sharpness=dict(entropy=[1, 3], log=4, zero=0), rank=dict(state=None), ccs=0.5)
    places = {'sharpness.entropy / log': [0.25, 0.75], 'sharpness.entropy / zero': [math.nan], 'ccs': [0.5]}
    for place, expected in {**places, 'rank.state.effective / at_most': [math.nan]}.items():
        np.testing.assert_array_equal(pictures.numbers_at(entry, place), expected)
    assert pictures.evenly_spaced(3, 8) == [0, 1, 2] and pictures.evenly_spaced(9, 3) == [0, 4, 8]
