# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What only a GPU can show; skipped without one. Needs torch, mmengine and mmcv-lite alone."""

import pytest
import torch
from mmengine.registry import MODELS

from mmlinattn import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')

TINY = [
    dict(type='RAVLT', arch='tiny'),
    dict(type='RAVLT', arch='tiny', stage_attns=('rala',) * 4),
    dict(type='LinearPVT', arch='inline-tiny'),
    dict(type='LinearPVT', arch='flatten-tiny'),
    dict(type='LinearPVTv2', arch='flatten-b1'),
    dict(type='LinearSwin', arch='inline-tiny'),
    dict(type='LinearSwin', arch='flatten-tiny'),
    dict(type='LinearSwin', arch='softmax-tiny'),
    dict(type='LinearCSWin', arch='inline-tiny'),
    dict(type='LinearCSWin', arch='flatten-tiny'),
    dict(type='LinearDeiT', arch='inline-tiny', out_type='featmap'),
    dict(type='LinearNextViT', arch='softmax-small'),
    dict(type='LinearNextViT', arch='hmhsa-small'),
]
every_backbone = pytest.mark.parametrize('cfg', TINY, ids=lambda cfg: ' '.join(map(str, cfg.values())))
in_half_precision = pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)


def build(cfg: dict):
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # weights that give the branches something to say
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def largest_difference(a, b) -> float:
    return ((a - b).abs().max() / b.std()).item()


def distance(a, b) -> float:
    return ((a.float() - b).norm() / b.norm()).item()


@every_backbone
def test_cuda_equals_cpu(cfg):
    model = build(cfg).eval()
    image = torch.randn(2, 3, 200, 270)
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = model(image)
        outs = model.cuda()(image.cuda())
    for out, reference in zip(outs, expected):
        assert largest_difference(out.cpu(), reference) < 1e-3


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
        assert distance(out, reference) < (0.02 if dtype == torch.float16 else 0.12)


@pytest.mark.slow
@every_backbone
def test_compiles_whole(cfg):
    torch._dynamo.reset()
    model = build(cfg).cuda().eval()
    image = torch.randn(1, 3, 224, 320, device='cuda')
    with torch.no_grad():
        outs, expected = torch.compile(model, fullgraph=True)(image), model(image)
    for out, reference in zip(outs, expected):
        assert largest_difference(out, reference) < 1e-2


# --- kernels at sizes that only a GPU stands --------------------------------------------------------------------------


@pytest.mark.parametrize(
    'batch, tokens, heads, d, dtype',
    [
        (1, 2**20, 4, 32, torch.bfloat16),  # 4096 x 4096 pixels in a first stage
        (64, 3136, 3, 32, torch.float16),
        (2, 16387, 16, 64, torch.bfloat16),
        (8, 1021, 4, 48, torch.float32),
        (3, 777, 2, 128, torch.bfloat16),
        (1, 2**20 + 1, 16, 48, torch.bfloat16),  # 2^31 numbers and more
    ],
)
@pytest.mark.parametrize('name', ['rala', 'inline_attention', 'linear_attention', 'focused_attention'])
def test_kernels_at_large_sizes(name, batch, tokens, heads, d, dtype):
    pytest.importorskip('triton')
    angle = torch.rand(tokens, d // 2, device='cuda')
    options = {
        'rala': dict(rotary=torch.stack((angle.cos(), angle.sin()), dim=-1), weight_scale=d**-0.5),
        'inline_attention': dict(scale=d**-0.5),
        'linear_attention': dict(kernel='elu'),
        'focused_attention': dict(inverse_scale=torch.rand(heads * d, device='cuda') + 0.5, power=3),
    }[name]
    op = getattr(ops, name)
    x = torch.randn(batch, tokens, 3 * heads * d, device='cuda', dtype=dtype).requires_grad_()
    out = op(*x.chunk(3, dim=-1), heads, **options)
    assert f'mmlinattn_{name}' in str(out.grad_fn)
    probe = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, x, probe)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    if name == 'focused_attention' and out.numel() > 2**28:  # the plain form takes a multiple of the memory
        assert out.isfinite().all() and grad.isfinite().all()
        return
    # a head is what it is alone, but for the focused map's norms over all channels
    for first, last in [(0, heads)] if name == 'focused_attention' else [(0, 1), (heads - 1, heads)]:
        channels = slice(first * d, last * d)
        leaves = [t[..., channels].detach().float().requires_grad_() for t in x.chunk(3, dim=-1)]
        with ops.use('reference'):
            expected = op(*leaves, last - first, **options)
        expected_grads = torch.autograd.grad(expected, leaves, probe[..., channels].float())
        assert distance(out[..., channels], expected) < tolerance
        for ours, theirs in zip(grad.chunk(3, dim=-1), expected_grads):
            assert distance(ours[..., channels], theirs) < tolerance
