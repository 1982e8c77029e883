# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Position tables."""

import copy
import pickle

import pytest
import torch

from mmlinattn.attention import Grid
from mmlinattn.layers import (
    PositionTable,
)
from mmlinattn.layers.position import resize_table


def test_position_tables_start_with_small_random_vectors():
    """Of standard deviation 0.02, as in the released ViTs; those of class tokens, too."""
    table = PositionTable(4096, (2, 3), prefix=2).weight[0].detach()
    assert table.std(dim=1).tolist() == pytest.approx(8 * [0.02], rel=0.1)


def test_position_tables_are_added_in_the_type_of_the_tokens():
    """Class tokens that the table has no vectors for get none; those that it has, as they are."""
    table = PositionTable(6, (2, 3), prefix=1)
    patches = table.weight[:, 1:]
    x = torch.randn(2, 7, 6)
    torch.testing.assert_close(table.add_to(x, Grid(2, 3, prefix=1)), x + table.weight)
    half = x.bfloat16()
    torch.testing.assert_close(table.add_to(half, Grid(2, 3, prefix=1)), half + table.weight.bfloat16())
    found = PositionTable.on(table, Grid(2, 3, prefix=3))
    assert not found[:, :2].any()
    torch.testing.assert_close(found[:, 2:], table.weight)
    assert found[:, 3:].shape == patches.shape
    halved = copy.deepcopy(table).half()
    resized = halved.resized(4, 5)
    assert resized.dtype == torch.float16 and torch.equal(resized[:, :1], halved.weight[:, :1])
    torch.testing.assert_close(resized.float(), table.resized(4, 5), rtol=0.01, atol=1e-4)


@pytest.mark.usefixtures('fast_forms')
def test_copies_of_position_tables_go_without_what_was_kept():
    """It may belong to a graph, or to inference, of which copies and pickles know nothing."""
    table = PositionTable(6, (2, 3))
    with torch.no_grad():
        kept = table.resized(4, 5)
    assert table._resized is not None
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert copied._resized is None and torch.equal(copied.weight, table.weight)
        with torch.no_grad():
            torch.testing.assert_close(copied.resized(4, 5), kept)
    with torch.no_grad():
        assert table.resized(4, 5) is kept


@pytest.mark.parametrize(
    'shape', [(), (9,), (10, 6), (9, 6), (1, 1, 9, 6), (1, 11, 6), (1, 9, 6), (1, 1, 6), (1, 0, 6)], ids=str
)
def test_position_tables_of_another_form_stay(shape):
    """What they are is for the report of the loading to say."""
    weight = torch.randn(shape)
    assert PositionTable(6, (4, 4), prefix=1).fit(weight) is weight


def test_position_tables_of_another_grid_are_resized():
    weight = torch.randn(1, 10, 6)
    fitted = PositionTable(6, (4, 4), prefix=1).fit(weight)
    assert fitted.shape == (1, 17, 6) and torch.equal(fitted[:, 0], weight[:, 0])


@pytest.mark.parametrize('part', [(3, 5), (2, 4), (3, 2)])
def test_tables_of_part_of_a_window_are_those_of_the_window(part):
    """In graphs, whose sizes are open, as in eager runs; only there the grid may go beyond."""
    table = PositionTable(6, (4, 6)).double()
    whole = resize_table(table.weight, (4, 6), (3, 5)).unflatten(1, (3, 5))
    grid = Grid(*part, within=(3, 5))
    expected = whole[:, : part[0], : part[1]].flatten(1, 2)
    torch.testing.assert_close(table.on(grid), expected)
    torch.testing.assert_close(table.resized_in_graph(grid), expected)
    beyond = table.resized_in_graph(Grid(4, 7, within=(3, 5))).unflatten(1, (4, 7))
    torch.testing.assert_close(beyond[:, :3, :5], whole)


@pytest.mark.parametrize('prefix', [0, 2])
def test_tables_in_graphs_keep_the_vectors_of_class_tokens(prefix):
    table = PositionTable(6, (4, 6), prefix).double()
    for size in ((3, 5), (4, 6), (7, 1)):
        expected = resize_table(table.weight, (4, 6), size, prefix)
        torch.testing.assert_close(table.resized_in_graph(Grid(*size, prefix=prefix)), expected)
        torch.testing.assert_close(table.on(Grid(*size, prefix=prefix)), expected)
    assert table.half().resized_in_graph(Grid(3, 5)).dtype == torch.float16
