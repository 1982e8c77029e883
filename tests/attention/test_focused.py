# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What FLatten promises of its feature map, and the position tables of its keys."""

import pytest
import reference
import torch
import twins
from hypothesis import settings
from torch import nn
from twins import DIM, assert_same, build, tokens

from mmlinattn.attention import Grid
from mmlinattn.ops.focused import focused_map

few = settings(deadline=None, derandomize=True, max_examples=12)
POWERS = [1, 1.5, 2, 3, 3.5, 4, 5, 8, 16, 32]
every_power = pytest.mark.parametrize('power', POWERS)
ONES = torch.ones(DIM)


@every_power
def test_the_map_is_that_of_the_paper(power):
    """With its gradients; |phi_p(x)| = |ReLU(x)|: only the direction changes (Eq. 8); power 1 is ReLU."""
    x = torch.randn(2, 40, DIM, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(DIM, dtype=torch.float64, requires_grad=True)
    fast = focused_map(x, 1 / nn.functional.softplus(scale), power)
    assert_same(fast, reference.focused(x, scale, power), [x, scale])
    plain = focused_map(x, ONES.double(), power)
    torch.testing.assert_close(plain.norm(dim=-1), (x.relu() + 1e-6).norm(dim=-1))
    if power == 1:
        torch.testing.assert_close(plain, x.relu() + 1e-6)
    # no positive channel: eps in all of them, whatever the power, in float32
    dead = focused_map(-torch.rand(4, DIM), ONES, power)
    torch.testing.assert_close(dead, torch.full_like(dead, 1e-6), rtol=1e-4, atol=0)


@pytest.mark.parametrize('shape', [(0, 5, DIM), (3, 1, DIM), (70, 33, DIM), (2, 3, 1201, DIM)], ids=str)
@pytest.mark.parametrize('training', [False, True])
def test_many_rows_and_few(shape, training):
    """However many tokens are mapped at a time, also slices of a projection."""
    x, scale = torch.randn(*shape[:-1], 3 * DIM, requires_grad=training), torch.rand(DIM)
    for part in x.split(DIM, dim=-1):
        expected = reference.focused(part.double(), scale.double(), 3).float()
        found = focused_map(part, 1 / nn.functional.softplus(scale), 3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('prefix', [0, 1])
def test_a_resized_table_enters_the_keys(prefix):
    """Class tokens have no position."""
    attention, x, grid = build('focused', grid=(6, 4)), tokens(2, prefix + 15), Grid(3, 5, prefix)
    out, table = attention(x, grid), attention.mixer.position.resized(3, 5)
    attention.mixer.position.weight = nn.Parameter(torch.cat((torch.zeros(1, prefix, DIM), table), dim=1))
    torch.testing.assert_close(out, twins.twin(attention, 'focused', x, grid))
