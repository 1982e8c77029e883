# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Measures of attention maps with known results; for whole blocks see test_inspecting.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlinattn.tooling.analysis import inspecting


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(1, 8), st.sampled_from([(8, 8), (200, 8), (8, 200), (30, 20)]))
def test_a_product_of_rank_r_has_rank_r(rank, shape):
    matrix = torch.randn(2, shape[0], rank) @ torch.randn(2, rank, shape[1])
    found = inspecting.ranks(matrix)
    assert found['rank'] == [rank] * 2 and max(found['above_1_percent']) <= rank
    assert all(1 - 1e-4 <= value <= rank + 1e-3 for value in found['effective'])
    assert inspecting.ranks(3e5 * matrix)['rank'] == [rank] * 2  # relative to the largest


def test_effective_rank_and_threshold():
    for values, rank, above, effective in (
        ((4.0, 4.0, 4.0, 0.0), 3, 3, 3),
        ((1.0, 0.02, 0.005, 0.0), 3, 2, None),
        ((0.0, 0.0, 0.0, 0.0), 0, 0, 0),
    ):
        found = inspecting.ranks(torch.tensor(values).diag()[None])
        assert (found['rank'], found['above_1_percent'], found['at_most']) == ([rank], [above], 4)
        assert effective is None or found['effective'] == pytest.approx([effective])
    orthogonal = torch.linalg.qr(torch.randn(16, 16))[0]
    assert inspecting.ranks(orthogonal[None])['effective'] == pytest.approx([16])


def test_distances_of_pairs_that_are_close():
    weights = torch.tensor([10.0, 0, 0]).repeat(1, 30, 1)
    weights[0, 0, 1] = 1e-4
    found = inspecting.pair_distances(weights)[0]
    assert found[:29].tolist() == pytest.approx([1e-4] * 29, rel=1e-3) and found[29:].max() < 1e-6


def test_similarity_of_heads():
    one, other = torch.rand(2, 6, 9).unbind()
    assert inspecting.cross_head_similarity(torch.stack((one, 2 * one, one))) == pytest.approx(1)
    disjoint = torch.zeros(2, 1, 4)
    disjoint[0, 0, :2], disjoint[1, 0, 2:] = 1, 1
    assert inspecting.cross_head_similarity(disjoint) == 0
    mixed = (one.flatten() @ other.flatten() / one.norm() / other.norm()).item()
    assert inspecting.cross_head_similarity(torch.stack((one, other, one))) == pytest.approx((2 * mixed + 1) / 3)
