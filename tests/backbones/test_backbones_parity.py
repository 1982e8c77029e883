# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Backbones against outputs of the authors' released code. Published parameter counts: tests/configs."""

import pytest
import torch
from helpers import goldens
from mmengine.registry import MODELS
from torch import nn

from mmlinattn.backbones import RAVLT, LinearCSWin, LinearDeiT, LinearNextViT, LinearPVT, LinearPVTv2, LinearSwin

BACKBONES = dict(
    ravlt=RAVLT,
    pvt=LinearPVT,
    pvt_v2=LinearPVTv2,
    swin=LinearSwin,
    cswin=LinearCSWin,
    deit=LinearDeiT,
    nextvit=LinearNextViT,
)
SIZES = dict(t='tiny', s='small', m='medium', l='large', b='base')
CASES = goldens.cases()


def backbone_and_arch(name):
    method, *backbone, size = [part for part in name.split('_') if 'x' not in part[1:-1] or part == 'nextvit']
    if method == 'ravlt':
        return RAVLT, SIZES[size]
    return BACKBONES['_'.join(backbone)], f'{method}-{SIZES.get(size, size)}'


def released(name, tmp_path, **options):
    """Return a model with weights loaded by ``init_cfg`` from a file with the released keys."""
    checkpoint = tmp_path / 'released.pth'
    torch.save({'model': goldens.state_dict(name)}, checkpoint)
    backbone, arch = backbone_and_arch(name)
    init_cfg = dict(type='Pretrained', checkpoint=str(checkpoint))
    model = MODELS.build(dict(type=backbone.__name__, arch=arch, init_cfg=init_cfg, **options))
    model.init_weights()
    return model.double().eval()


@pytest.mark.parametrize('name', CASES)
def test_released_weights_give_the_released_outputs(name, tmp_path):
    """Compare parameter counts, outputs of the stages, and logits."""
    stored, raw, model = goldens.outputs(name), [], released(name, tmp_path)
    own = sum(p.numel() for p in model.parameters())
    count = own if 'det' in name else round(millions(*backbone_and_arch(name)) * 1e6)
    assert count == goldens.info(name)['params']
    # the larger ones of RAVLT in single precision: exact and slow
    dtype, tolerance = (torch.float32, 5e-5) if 'ravlt_' in name and name != 'ravlt_t' else (torch.float64, 1e-5)
    if 'deit' not in name:
        for norm in model.out_norms.values():
            norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
    with torch.no_grad():
        outs = model.to(dtype)(goldens.image(name).to(dtype))
    if raw:
        found = outs if 'det' in name else raw
        for i, (out, feature) in enumerate(zip(found, goldens.info(name)['features'], strict=True)):
            assert list(out.shape) == feature['shape']
            assert goldens.error(out, stored[f'feat{i}']) < tolerance
    if 'logits' in stored and 'ravlt' not in name:  # RAVLT's classifier is a neck and a head
        state = goldens.state_dict(name)
        last = (raw if 'pvt_t' in name else outs)[-1]  # PVT's classifiers stand on the last stage itself
        pooled = last if last.dim() == 2 else last.mean(dim=(2, 3))
        head = 'proj_head.0' if 'nextvit' in name else 'head'
        logits = pooled @ state[f'{head}.weight'].double().T + state[f'{head}.bias'].double()
        expected = torch.from_numpy(stored['logits']).double()
        assert (logits - expected).abs().max() < 1e-5 * expected.std()


def millions(backbone, arch):
    """Return the parameters in millions of a backbone, its last norm and its classifier."""
    with torch.device('meta'):
        options = {} if backbone is LinearDeiT else dict(out_indices=(3,))
        if 'hmhsa' in arch:  # printed of the merged form
            options['deploy'] = True
        # InLine-PVT has no last norm; FLatten-PVT carries one that its forward pass never applies
        has_norm = backbone is not RAVLT and (backbone is not LinearPVT or 'inline' not in arch)
        model = backbone(arch, out_norm=has_norm, **options)
        channels = model.embed_dims[-1]
        head = nn.Sequential(nn.Linear(channels, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1000))
        head = head if backbone is RAVLT else nn.Linear(channels, 1000)
    return sum(p.numel() for module in (model, head) for p in module.parameters()) / 1e6
