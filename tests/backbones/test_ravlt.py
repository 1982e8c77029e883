# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RAVLT against its equations written out, and its options."""

import pytest
import reference_ravlt
import torch
from helpers import goldens
from helpers.small_backbones import ARCHS, image

from mmlinattn.backbones import RAVLT

ARCH = ARCHS['RAVLT']


@pytest.mark.parametrize('attns', [None, ('rala',) * 4], ids=['hybrid', 'linear'])
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_equals_the_equations_written_plainly(attns, training):
    model = goldens.fill(RAVLT(ARCH, stage_attns=attns, drop_path_rate=0.0)).double().train(training)
    x = image().double()
    outs, expected = model(x), reference_ravlt.forward(model, x)
    torch.testing.assert_close(outs, expected)
    probes = [torch.randn_like(out) for out in outs]
    parameters = list(model.parameters())
    grads = (torch.autograd.grad(found, parameters, probes) for found in (outs, expected))
    torch.testing.assert_close(*grads, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize('options', [dict(cpe=False), dict(rotary=False), dict(local_kernel=None)], ids=str)
def test_ablations_of_the_paper_are_arguments(options):
    """Turn off one part of the block: its weights are gone, and the outputs differ."""
    default, model, x = goldens.fill(RAVLT(ARCH)), RAVLT(ARCH, norm_eval=True, **options).train(), image()
    state, left = default.state_dict(), model.state_dict()
    assert any('.position.' in key for key in left) is ('cpe' not in options)
    assert any('.local.' in key for key in left) is ('local_kernel' not in options)
    assert (model.stage_context(0, torch.zeros(1, 8, 8, 8)).rotary is None) is ('rotary' in options)
    model.load_state_dict({key: state[key] for key in left})
    outs = model(x)
    sum(out.square().mean() for out in outs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (model.eval()(x)[-1] - default.eval()(x)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_angles_are_no_numbers_of_half_precision(dtype):
    """Store angles in float32 or better, as bfloat16 counts only to 256."""
    table = RAVLT(ARCH).stage_context(1, torch.zeros(1, 2, 300, 16, dtype=dtype)).rotary
    assert table.dtype == torch.promote_types(dtype, torch.float32) and len(table.unique(dim=0)) == 600
