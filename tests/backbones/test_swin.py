# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows of Swin and CSWin."""

import pytest
import small_hosts
import torch
from small_hosts import ARCHS, image, loss

from mmlinattn.attention import StripeAttention


@pytest.mark.parametrize('attns', [['softmax', 'rala'], ['rala', 'softmax']], ids=str)
def test_each_block_of_cswin_has_the_windows_of_its_own_attention(attns):
    """Stripes of a quadratic attention, the whole map of a linear one, side by side in a stage."""
    model = small_hosts.build('LinearCSWin', stage_attns=('softmax', 'rala', attns, 'softmax'))
    assert [isinstance(block.attn, StripeAttention) for block in model.stages[2]] == [
        attn == 'softmax' for attn in attns
    ]


def window_of(model):
    return [[block.attn.window for block in stage] for stage in model.stages]


def test_window_size():
    def built(window_size):
        attns = ('inline', 'inline', ['inline', 'softmax'], 'softmax')
        return window_of(small_hosts.build('LinearSwin', window_size=window_size, stage_attns=attns))

    trained = [[(7, 7)], [(4, 4)], [(3, 3), (3, 3)], [(3, 3)]]
    assert built('trained') == trained
    assert built(None) == [[None], [None], [None, (3, 3)], [(3, 3)]]
    assert built(5) == [[(5, 5)], [(5, 5)], [(5, 5)] * 2, [(5, 5)]]
    assert built((9, None, 'trained', 2)) == [[(9, 9)], [None], [(3, 3)] * 2, [(2, 2)]]
    assert built([9, None, 'trained', 2]) == built((9, None, 'trained', 2))


def test_position_tables_are_of_the_window_or_of_the_trained_one_where_there_is_none():
    def tables(window_size):
        model = small_hosts.build('LinearSwin', 'focused', window_size=window_size)
        return [stage[0].attn.mixer.position.grid for stage in model.stages]

    trained = [(7, 7), (4, 4), (3, 3), (2, 2)]
    assert tables('trained') == tables(None) == trained
    assert tables(5) == [(5, 5)] * 4
    assert tables((9, None, 'trained', 1)) == [(9, 9), (4, 4), (3, 3), (1, 1)]


def test_blocks_of_swin_shift_in_turn_where_windows_are_small():
    arch = dict(ARCHS['LinearSwin'], depths=(2, 3, 2, 1))
    attns = ('softmax', 'hallucinated', ['inline', 'rala'], 'rala')
    model = small_hosts.build('LinearSwin', arch=arch, stage_attns=attns)
    assert [[block.attn.shift for block in stage] for stage in model.stages] == [
        [False, True],
        [False, True, False],
        [False, False],
        [False],
    ]
    biased = [[block.attn.relative_bias is not None for block in stage] for stage in model.stages]
    assert biased == [[True] * 2, [True] * 3, [False] * 2, [False]]


@pytest.mark.parametrize('attn', ['inline', 'rala'])
def test_windows_larger_than_the_map_are_the_map(attn):
    """At the trained size and below, a windowed model and its global form are one."""
    large, whole = (small_hosts.build('LinearSwin', attn, window_size=size).eval() for size in (24, None))
    for out, expected in zip(large(x := image()), whole(x)):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('window_size', ['trained', None, 5, (5, None, 3, 2)], ids=str)
@pytest.mark.parametrize('attn', ['inline', 'focused', 'rala'])
def test_every_window_size_trains_at_odd_sizes(attn, window_size):
    model = small_hosts.build('LinearSwin', attn, window_size=window_size).train()
    loss(model(image(2, 75, 101))).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
