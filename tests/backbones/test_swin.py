# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Windows of Swin and CSWin."""

import pytest
import small_hosts
from small_hosts import ARCHS

from mmlinattn.attention import StripeAttention


@pytest.mark.parametrize('attns', [['softmax', 'rala'], ['rala', 'softmax']], ids=str)
def test_each_block_of_cswin_has_the_windows_of_its_own_attention(attns):
    """Stripes of a quadratic attention, the whole map of a linear one, side by side in a stage."""
    model = small_hosts.build('LinearCSWin', stage_attns=('softmax', 'rala', attns, 'softmax'))
    assert [isinstance(block.attn, StripeAttention) for block in model.stages[2]] == [
        attn == 'softmax' for attn in attns
    ]


def test_window_size():
    """Of all blocks, of a stage, or trained; linear ones may see the whole map. Position tables are of the window, or
    of the trained one where there is none."""

    def built(window_size):
        attns = ('focused', 'focused', ['focused', 'softmax'], 'softmax')
        model = small_hosts.build('LinearSwin', window_size=window_size, stage_attns=attns)
        blocks = [block.attn for stage in model.stages for block in stage]
        return [attn.window for attn in blocks], [attn.mixer.position.grid for attn in blocks[:3]]

    trained = [(7, 7), (4, 4), (3, 3)]
    assert built('trained') == ([*trained, (3, 3), (3, 3)], trained)
    assert built(None) == ([None, None, None, (3, 3), (3, 3)], trained)
    assert built(5) == ([(5, 5)] * 5, [(5, 5)] * 3)
    expected = [(9, 9), None, (3, 3), (3, 3), (2, 2)], [(9, 9), (4, 4), (3, 3)]
    assert built((9, None, 'trained', 2)) == built([9, None, 'trained', 2]) == expected


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
