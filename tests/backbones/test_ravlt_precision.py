# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Half precision: finite outputs and gradients, close to those of float32."""

import pytest
import small_hosts
import torch

from mmlinattn.backbones import RAVLT

HALF = [torch.float16, torch.bfloat16]
ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_heads=(1, 2, 3, 4))
ARCHS = list(RAVLT.arch_zoo)


def assert_trains(model, x, dtype):
    device = next(model.parameters()).device.type
    with torch.autocast(device, dtype):
        outs = model(x)
    assert all(out.isfinite().all() for out in outs)
    # what a loss scale of 2 ** 10 makes of gradients of the order of one
    (sum(out.float().square().mean() for out in outs) * 2**10).backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad


@pytest.mark.parametrize(
    ('arch', 'dtype'),
    [(arch, torch.bfloat16) for arch in ARCHS]
    + [(arch, torch.float16) for arch in ARCHS[:2]]
    + [pytest.param(arch, torch.float16, marks=pytest.mark.slow) for arch in ARCHS[2:]],
    ids=str,
)
def test_autocast_is_finite(arch, dtype):
    size = (64, 96) if dtype == torch.bfloat16 else (32, 32)  # CPUs have few float16 kernels
    assert_trains(RAVLT(arch).train(), torch.randn(2, 3, *size), dtype)


@pytest.mark.parametrize('linear', [False, True], ids=['hybrid', 'linear'])
@pytest.mark.parametrize('dtype', HALF, ids=str)
def test_autocast_is_close_to_float32(dtype, linear):
    model = RAVLT(ARCH, stage_attns=('rala',) * 4 if linear else None).eval()
    x = torch.randn(1, 3, 128, 160)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast('cpu', dtype):
            outs = model(x)
    for out, expected in zip(outs, exact):
        assert (out - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()


def test_large_activations_in_float16():
    """Normalised inputs 100 times their usual size, as a badly scaled fine-tuning run has them."""
    model = RAVLT(ARCH, stage_attns=('rala', 'rala', 'softmax', 'rala')).train()
    assert_trains(model, 100 * torch.randn(2, 3, 64, 64), torch.float16)


@pytest.mark.parametrize('dtype', HALF, ids=str)
def test_a_model_all_in_half_precision(dtype):
    model = RAVLT(ARCH).to(dtype).eval()
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        outs = model(x.to(dtype))
        exact = model.float()(x)
    for out, expected in zip(outs, exact):
        assert out.dtype == dtype
        assert (out - expected).norm() < 16 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize('arch', [ARCHS[0], ARCHS[-1]])
def test_autocast_is_finite_at_the_size_of_a_detector(arch):
    """Of the narrowest and the widest; all blocks of all at a small size, above, and on a GPU."""
    assert_trains(small_hosts.shallow(RAVLT, arch).train(), torch.randn(1, 3, 800, 1333), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize('linear', [False, True], ids=['hybrid', 'linear'])
def test_float16_is_finite_at_the_size_of_a_detector(linear):
    """A thin model: CPUs compute float16 slowly, and the number of tokens is what counts."""
    model = RAVLT(ARCH, stage_attns=('rala',) * 4 if linear else None)
    assert_trains(model.train(), torch.randn(1, 3, 800, 1333), torch.float16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('arch', ARCHS)
@pytest.mark.parametrize('linear', [False, True], ids=['hybrid', 'linear'])
def test_autocast_is_finite_at_the_size_of_a_detector_on_a_gpu(arch, dtype, linear):
    model = RAVLT(arch, stage_attns=('rala',) * 4 if linear else None).cuda().train()
    assert_trains(model, torch.randn(1, 3, 800, 1333, device='cuda'), dtype)
