# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Checks that need a GPU; skipped without one. They need torch, mmengine and mmcv-lite alone."""

import pytest
import torch
from mmengine.registry import MODELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')

TINY = [
    dict(type='RAVLT', arch='tiny'),
    dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    dict(type='LinearPVT', arch='flatten-tiny'),
    dict(type='LinearSwin', arch='inline-tiny'),
    dict(type='LinearCSWin', arch='inline-tiny'),
    dict(type='LinearDeiT', arch='inline-tiny', out_type='featmap'),
    dict(type='LinearNextViT', arch='hmhsa-small'),
]
every_backbone = pytest.mark.parametrize('cfg', TINY, ids=lambda cfg: ' '.join(map(str, cfg.values())))
in_half_precision = pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)


def build(cfg: dict):
    model = MODELS.build(cfg)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # branches say something, and Next-ViT, without a last norm, stays within float16
            torch.nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
    return model


@every_backbone
def test_cuda_equals_cpu(cfg):
    model = build(cfg).eval()
    image = torch.randn(2, 3, 200, 270)
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = model(image)
        outs = model.cuda()(image.cuda())
    for out, reference in zip(outs, expected):
        assert (out.cpu() - reference).abs().max() < 1e-3 * reference.std()


@in_half_precision
@every_backbone
def test_autocast_is_finite_at_detection_size(cfg, dtype):
    model = build(cfg).cuda().train()
    with torch.autocast('cuda', dtype):
        outs = model(torch.randn(1, 3, 800, 1333, device='cuda'))
        loss = sum(out.float().mean() for out in outs)
    loss.backward()
    assert all(out.isfinite().all() for out in outs)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@in_half_precision
@every_backbone
def test_autocast_follows_float32(cfg, dtype):
    model = build(cfg).cuda().eval()
    image = torch.randn(1, 3, 416, 608, device='cuda')
    with torch.no_grad():
        expected = model(image)
        with torch.autocast('cuda', dtype):
            outs = model(image)
    for out, reference in zip(outs, expected):
        assert (out.float() - reference).norm() < (0.02 if dtype == torch.float16 else 0.03) * reference.norm()
