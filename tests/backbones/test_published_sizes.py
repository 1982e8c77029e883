# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Published sizes. Parameter counts of the papers: tests/configs; released outputs: test_backbones_parity.py."""

import pytest
import torch
from helpers.small_backbones import ARCHS
from mmengine.registry import MODELS


@pytest.mark.parametrize('backbone', ARCHS)
def test_drop_rates_grow_over_all_blocks(backbone):
    """Include blocks that are not built."""
    kind = MODELS.get(backbone)
    with torch.device('meta'):
        model = kind(next(iter(kind.arch_zoo)), out_indices=(0,))
    assert model.drop_paths[0][0] == 0
    assert model.drop_paths[-1][-1] == pytest.approx(model.arch['drop_path_rate']) != 0
