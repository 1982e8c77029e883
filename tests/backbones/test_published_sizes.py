# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Published sizes. Parameter counts of the papers: tests/configs; released outputs: test_hosts_parity.py."""

import pytest
import torch
from helpers.small_hosts import ARCHS
from mmengine.registry import MODELS


@pytest.mark.parametrize('host', ARCHS)
def test_drop_rates_grow_over_all_blocks(host):
    """Blocks that are not built count, too."""
    kind = MODELS.get(host)
    with torch.device('meta'):
        model = kind(next(iter(kind.arch_zoo)), out_indices=(0,))
    assert model.drop_paths[0][0] == 0
    assert model.drop_paths[-1][-1] == pytest.approx(model.arch['drop_path_rate']) != 0
