# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Arithmetic of sizes; that graphs stay open by it is in ``tests/tooling/export/test_graphs_at_other_sizes.py``."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mmlinattn.ops import tensors
from mmlinattn.utils import private_apis


@pytest.mark.parametrize('old', [False, True])
def test_numbers_are_known_and_tensors_are_not(old, monkeypatch):
    """Also by PyTorch before 2.5, which is asked for the type of each."""
    if old:
        monkeypatch.delattr(private_apis.symbolic_shapes, 'has_static_value', raising=False)
    assert tensors.is_known() and tensors.is_known(3) and tensors.is_known(3, 4)
    for unknown in ((torch.tensor(3),), (3, torch.tensor(4)), (torch.tensor(4), 3)):
        assert not tensors.is_known(*unknown)


def test_known_sizes_leave_maps_where_they_are():
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert tensors.clone_if_open(x) is x
    image = tensors.to_image(x)
    assert image.shape == (2, 5, 3, 4) and image.data_ptr() == x.data_ptr()
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert image[1, 2, 0, 3] == x[1, 0, 3, 2]


@pytest.mark.parametrize(('least', 'copied'), [(1, True), (2, False)])
def test_open_sizes_that_may_be_one_are_settled(least, copied):
    """As ``torch.export`` has them, of a map's height; a copy is contiguous, what lies as it is stays."""
    environment = ShapeEnv()
    height = environment.create_unbacked_symint()
    torch._check(height >= least)
    with FakeTensorMode(shape_env=environment):
        x = torch.empty(height, 4, 3).transpose(1, 2)
        found = tensors.clone_if_open(x)
    assert (found is not x) is copied and found.stride() == ((12, 4, 1) if copied else (12, 1, 3))
