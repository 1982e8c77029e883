# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Multiply-adds and memory against numbers calculated by hand, and costs of the models of configs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.config_helpers import load
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.attention import Grid, HallucinatedMixer, InLineMixer
from mmlinattn.tooling.analysis.flops import CONV, LINEAR, PRODUCT, OpCounter, count_model, part_of
from mmlinattn.utils.errors import RunError

# --- operations and memory --------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Model with an unnamed last layer, and non-contiguous rows before the first linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.nameless = [nn.Linear(6, 5, bias=False)]

    def forward(self, x):
        x = self.linear(self.conv(x).permute(0, 2, 3, 1)).flatten(1, 2)
        state = x.transpose(1, 2) @ x
        x = self.norm(x)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], self.nameless[0](x)[:, None]), state


def test_deformable_convolutions():
    deform_conv2d = pytest.importorskip('torchvision.ops').deform_conv2d
    x, offset, weight = (torch.empty(*shape, device='meta') for shape in ((1, 4, 9, 7), (1, 18, 9, 7), (6, 2, 3, 3)))
    with OpCounter(nn.Identity()) as count:
        deform_conv2d(x, offset, weight, padding=1)
    assert count.macs == {('', CONV): 6 * 9 * 7 * 2 * 9}


def test_convolutions_by_predicted_kernels():
    with torch.device('meta'):
        mixer, mean = InLineMixer(24, 3), torch.zeros(2, 24)
        q, k, v = torch.zeros(3, 2, 20, 24)
    with torch.no_grad(), OpCounter(mixer) as count:
        assert mixer(q, k, v, Grid(4, 5), Grid(4, 5), context=mean).shape == (2, 20, 24)
    assert count.macs['residual', CONV] + count.macs['', CONV] == 2 * 20 * 24 * 9


def test_attention_called_by_names():
    q, k, v = (torch.empty(1, 2, n, 4, device='meta') for n in (6, 5, 5))
    for args, named in ((3, ()), (1, ('key', 'value')), (0, ('query', 'key', 'value'))):
        with OpCounter(nn.Identity()) as count:
            F.scaled_dot_product_attention(*(q, k, v)[:args], **dict(zip(named, (q, k, v)[args:])))
        assert count.macs == {('', PRODUCT): 2 * 6 * 5 * 8}


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_counts_by_kind_and_module(device):
    """Count twice with equal results. Unnamed modules and products belong to the module around them."""
    with torch.device(device):
        model, x = nn.Sequential(Toy()), torch.zeros(2, 4, 5, 7)
        for layer in model[0].nameless:
            layer.to(device)
    tokens, call = 2 * 5 * 7, nn.Module.__call__
    for _ in range(2):
        with torch.no_grad(), OpCounter(model) as count:
            model(x)
        model(x)  # behind the context, nothing counts
        assert count.macs == {
            ('0.conv', CONV): tokens * 8 * 2 * 9,
            ('0.linear', LINEAR): tokens * 8 * 6,
            ('0', LINEAR): tokens * 6 * 5,
            ('0', PRODUCT): tokens * 6 * 6 + tokens * 35 * (6 + 5),
        }
        assert nn.Module.__call__ is call


@pytest.mark.parametrize(
    ('steps', 'taps'), [((), 0), (('ihh',), 9 * 3), (('chh',), 3 * 3), (('ihh', 'chh'), 9 * 3 + 3 * 3)]
)
def test_hallucinated_attention_counts_as_its_paper_counts(steps, taps):
    """Count products of all heads, a 3x3 convolution of half of the maps, and their mixture. No map is in memory."""
    with torch.device('meta'):
        mixer = HallucinatedMixer(24, 3, steps=steps)
        q, k, v = torch.zeros(2, 30, 12), torch.zeros(2, 20, 12), torch.zeros(2, 20, 24)
    with torch.no_grad(), OpCounter(mixer) as count:
        assert mixer(q, k, v, Grid(5, 6), Grid(4, 5)).shape == (2, 30, 24)
    assert count.macs == {('', PRODUCT): 2 * 30 * 20 * (12 + 24 + taps)}
    assert count.peak_bytes < 2 * 4 * 30 * 24 * 4


def test_memory_counts_live_storages():
    with OpCounter(nn.Identity()) as count:
        for length in range(1, 8):
            x = torch.zeros(1000 * length, device='meta')
    assert count.peak_bytes == 4 * (6000 + 7000) and len(x) == 7000
    with torch.inference_mode(), OpCounter(nn.Identity()) as count:
        kept = torch.zeros(1000, device='meta')[:1]
        other = torch.zeros(500, device='meta')
    assert count.peak_bytes == 4 * (1000 + 500) and (len(kept), len(other)) == (1, 500)


# --- models of configs ------------------------------------------------------------------------------------------------


def test_ravlt_costs():
    pytest.importorskip('mmpretrain')
    cfg = copy.deepcopy(load('mmpretrain/ravlt_l_in1k'))
    cost = count_model(cfg)
    assert cfg.to_dict() == load('mmpretrain/ravlt_l_in1k').to_dict()  # classifiers add keys to their preprocessor
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


@pytest.mark.parametrize(
    ('name', 'part'),
    [
        ('backbone.patch_embeds.0.proj.weight', 'backbone.stage1'),
        ('backbone.out_norms.3.bias', 'backbone.stage4'),
        ('backbone.layer1.0.conv1.weight', 'backbone.stage1'),
        ('backbone.module.stages.2.0.attn', 'backbone.stage3'),  # in a wrapper, as adapters are
        ('backbone.module.layer10.0', 'backbone.stage10'),
        ('backbone.stem.weight', 'backbone'),
        ('roi_head.bbox_head.0.fc_cls', 'roi_head.bbox_head'),
        ('', 'model'),
    ],
)
def test_parts_of_a_model(name, part):
    assert part_of(name) == part


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
        self.tied = nn.Module()
        self.tied.weight = self.backbone.weight  # counts once

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
