# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One training step of each family of configs."""

import pytest
from helpers.config_helpers import build, without_gradient

import mmlinattn  # noqa: F401

for project in ('mmdet', 'mmseg', 'mmpretrain'):
    pytest.importorskip(project)


def small_heads(name: str) -> dict:
    if 'maskrcnn' in name:
        return dict(model__train_cfg__rcnn__sampler__num=16)
    return dict(model__data_preprocessor__size=(64, 64)) if name.startswith('mmseg') else {}


# each kind of head on some backbone, and the features of each backbone for a classifier; parameters of all backbones:
# tests/backbones; cascades: tests/tools/test_rounds.py
NAMES = """
mmdet/ravlt_t_maskrcnn_1x mmdet/ravlt_t_retinanet_1x mmdet/inline_deit_t_maskrcnn_1x
mmdet/flatten_pvt_v2_b1_retinanet_1x mmdet/flatten_cswin_t_maskrcnn_1x mmseg/ravlt_t_fpn_80k mmseg/inline_pvt_t_fpn_80k
mmseg/flatten_swin_t_upernet_160k mmpretrain/ravlt_t_in1k mmpretrain/inline_pvt_t_in1k mmpretrain/flatten_swin_t_in1k
mmpretrain/inline_cswin_t_in1k mmpretrain/inline_deit_t_in1k mmpretrain/hmhsa_nextvit_s_in1k
"""


@pytest.mark.parametrize('name', NAMES.split())
def test_every_parameter_gets_a_gradient(name):
    """Find no unused parameter, at which DistributedDataParallel would stop (``find_unused_parameters`` is off)."""
    model, cfg = build(name, **small_heads(name))
    model.init_weights()
    assert without_gradient(model, cfg) == []
