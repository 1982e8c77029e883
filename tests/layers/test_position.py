# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Position tables of any size."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmlinattn.attention import Grid
from mmlinattn.layers import PositionTable, RelativePositionBias
from mmlinattn.ops.positions import resize_table_in_graph

DIM = 6


def bilinear(table, grid, size):
    image = table.unflatten(1, grid).permute(0, 3, 1, 2)
    return nn.functional.interpolate(image, size, mode='bilinear', align_corners=False).flatten(2).transpose(1, 2)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))
def test_tables_are_resized_bilinearly(height, width, prefix):
    """Keep vectors of class tokens, and the table at its own grid; graphs of dynamic shape give the same."""
    table = PositionTable(DIM, (4, 5), prefix).double()
    grid, half = Grid(height, width, prefix=prefix), copy.deepcopy(table).half()
    expected = bilinear(table.weight.data[:, prefix:], (4, 5), (height, width))
    expected = torch.cat((table.weight[:, :prefix], expected), dim=1)
    for resized in (table(grid), resize_table_in_graph(table.weight, table.grid, grid, prefix)):
        assert torch.equal(resized[:, :prefix], table.weight[:, :prefix])
        torch.testing.assert_close(resized, expected)
    assert table(Grid(4, 5, prefix)) is table.weight
    for resized in (half(grid), resize_table_in_graph(half.weight, half.grid, grid, prefix)):
        assert resized.dtype == torch.float16
        torch.testing.assert_close(resized.double(), expected, rtol=0.01, atol=1e-4)


def test_class_tokens_without_a_vector_get_none():
    table = PositionTable(DIM, (2, 3), prefix=1)
    found = table(Grid(2, 3, prefix=3))
    assert not found[:, :2].any()
    torch.testing.assert_close(found[:, 2:], table.weight)


@pytest.mark.parametrize('prefix', [0, 1])
def test_a_checkpoints_table_of_another_square_fits(prefix):
    table, given = PositionTable(DIM, (6, 7), prefix), torch.randn(1, prefix + 16, DIM)
    fitted = table.fit(given)
    assert fitted.shape == table.weight.shape and torch.equal(fitted[:, :prefix], given[:, :prefix])
    torch.testing.assert_close(fitted[:, prefix:], bilinear(given[:, prefix:], (4, 4), (6, 7)))
    odd = [(), (9,), (10, DIM), (1, 1, 9, DIM), (1, prefix + 15, DIM), (1, prefix, DIM)]
    for other in (table.weight.data, *(torch.randn(shape) for shape in odd)):
        assert table.fit(other) is other


class Tables(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.table, self.tokens = PositionTable(DIM, (side, side)), PositionTable(DIM, (side, side), prefix=1)
        self.bias = RelativePositionBias((side, side), 2)


def test_state_dicts_of_other_grids_and_windows_load():
    given, model = Tables(4).state_dict(), Tables(6)
    shapes = {key: value.shape for key, value in given.items()}
    model.load_state_dict(given)
    assert {key: value.shape for key, value in given.items()} == shapes
    for name, module in model.named_children():
        key = f'{name}.{module.table_name}'
        assert torch.equal(module.state_dict()[module.table_name], module.fit(given[key]))
    with pytest.raises(RuntimeError, match='size mismatch for bias.table'):
        model.load_state_dict({**given, 'bias.table': torch.zeros(50, 2)})


def test_tables_without_deviation_start_at_zero():
    assert not PositionTable(DIM, (2, 3), std=0.0).weight.any()
