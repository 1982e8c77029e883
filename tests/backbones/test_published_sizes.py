# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Properties of published sizes beside parameter counts: heads, stochastic depth, windows, attentions, as printed or
released. Norms: test_hosts_parity.py."""

import json

import pytest
import torch
from helpers import goldens
from mmengine.registry import MODELS

import mmlinattn  # noqa: F401

ZOO = json.loads((goldens.FOLDER.parent / 'zoo.json').read_text())


@pytest.mark.parametrize('host', ZOO)
def test_every_size_is_as_published(host):
    """RALA Tab. 1 and its training script; InLine Tab. 14-16 and, for PVT, its release; FLatten, hMHSA, Next-ViT."""
    kind = MODELS.get(host)
    found = {name: kind.resolve_arch(name) for name in kind.arch_zoo}
    assert json.loads(json.dumps(found)) == ZOO[host]
    with torch.device('meta'):  # rates grow over all blocks, those that are not built included
        model = kind(next(iter(ZOO[host])), out_indices=(0,))
    rate = model.arch['drop_path_rate']
    assert model.drop_paths[0][0] == 0 and model.drop_paths[-1][-1] == pytest.approx(rate)
