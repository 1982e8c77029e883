# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Costs of the model of a config, against numbers calculated by hand and those of the released models."""

import pytest
import torch
from helpers.config_helpers import load
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

import mmlinattn  # noqa: F401
from mmlinattn.tooling.analysis.flops import CONV, LINEAR, count_model
from mmlinattn.utils.errors import RunError


def test_ravlt_costs():
    pytest.importorskip('mmpretrain')
    cost = count_model(load('mmpretrain/ravlt_l_in1k'))
    assert cost.shape == (224, 224)
    assert cost.layer_macs / 1e9 == pytest.approx(16.09, abs=0.01)
    assert cost.total_macs() > cost.layer_macs


def test_two_stage_parts_by_hand():
    pytest.importorskip('mmdet')
    cost = count_model(load('mmdet/ravlt_t_maskrcnn_1x'))
    assert cost.shape == (800, 1280) and any('1000 proposals' in note for note in cost.notes)
    # 1000 RoIs: 7 * 7 * 256 -> 1024 -> 1024 -> 81 classes and 80 boxes
    fc = 1000 * (7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    assert cost.macs['roi_head.bbox_head', LINEAR] == fc
    # 100 RoIs: four 3x3 and, at twice the size, a transposed 2x2 and the logits
    convs = 100 * (14 * 14 * 4 * 256 * 256 * 9 + 14 * 14 * 256 * 256 * 4 + 28 * 28 * 256 * 80)
    assert cost.macs['roi_head.mask_head', CONV] == convs
    # RPN on strides 4 to 64
    pixels = sum(-(-800 // stride) * -(-1280 // stride) for stride in (4, 8, 16, 32, 64))
    assert cost.macs['rpn_head', CONV] == pixels * (256 * 256 * 9 + 256 * 3 * 5)


def test_every_stage_of_a_cascade_counts():
    pytest.importorskip('mmdet')
    from helpers.small_detectors import FAMILIES

    cost = count_model(Config(dict(model=FAMILIES['CascadeRCNN'], default_scope='mmdet')), (64, 64))
    # 60 RoIs: 7 * 7 * 8 -> 16 -> 16 -> 4 classes and 4 coordinates
    assert cost.macs['roi_head.bbox_head', LINEAR] == 3 * 60 * (7 * 7 * 8 * 16 + 16 * 16 + 16 * (4 + 4))


class Segmentor(nn.Module):
    def __init__(self, data_preprocessor=None, auxiliary=True, teacher_ckpt=None, fails=False, reads=False):
        super().__init__()
        assert data_preprocessor == dict(a=1) and teacher_ckpt is None
        self.backbone, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4)
        self.auxiliary_head = nn.Linear(4, 4) if auxiliary else None
        self.semantic_head = nn.Linear(4, 4) if auxiliary else None
        self.norm.requires_grad_(False)  # frozen ones are parameters too
        self.fails = fails
        if reads:  # as adapters initialise real tensors
            float(self.norm.weight[0])

    def train(self, mode=True):  # as of MMDetection's students: gives nothing back
        super().train(mode)

    def forward(self, image, mode):
        if self.fails:
            raise TypeError('no data samples')
        assert mode == 'tensor' and not torch.is_grad_enabled() and not self.training and image.is_meta
        return self.norm(self.backbone(image))


@pytest.mark.parametrize('auxiliary', [True, False])
def test_a_model_is_counted_without_memory_and_reads_no_file(monkeypatch, auxiliary):
    monkeypatch.setitem(MODELS._module_dict, 'CountedToy', Segmentor)
    model = dict(type='CountedToy', auxiliary=auxiliary, teacher_ckpt='gone.pth')
    cfg = Config(dict(model=model, data_preprocessor=dict(a=1)))
    cost = count_model(cfg, (32, 40))
    assert cfg.model.to_dict() == model  # the config is unchanged
    pixels = 32 * 40
    assert cost.shape == (32, 40) and cost.macs == {('backbone', CONV): pixels * 3 * 4 * 9}
    assert cost.peak_bytes >= 2 * 4 * 4 * pixels
    assert cost.params == dict(backbone=112, norm=8, **(dict(auxiliary_head=20, semantic_head=20) if auxiliary else {}))
    assert cost.total_params == sum(cost.params.values())
    assert count_model(Config(dict(model=dict(model, reads=True), data_preprocessor=dict(a=1))), (32, 40)) == cost
    assert [note for note in cost.notes if 'did not run' in note or 'does not run' in note] == [
        'the auxiliary head has parameters but does not run at test time',
        'semantic_head did not run; its operations are missing',
    ][: 2 * auxiliary]
    with pytest.raises(RunError, match=r'Segmentor cannot be counted: .* \(TypeError: no data samples\)$'):
        count_model(Config(dict(model=dict(model, fails=True), data_preprocessor=dict(a=1))), (32, 40))
    for shape in ((31, 64), (64, 31)):
        with pytest.raises(RunError, match=f'--shape {shape[0]} {shape[1]}: expected at least 32 pixels per side'):
            count_model(cfg, shape)
