# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""RAVLT against its equations written plainly, and its options."""

import math

import goldens
import literal_ravlt
import pytest
import torch
from small_hosts import ARCHS, image
from torch import nn

from mmlinattn.backbones import RAVLT

ARCH = ARCHS['RAVLT']


@pytest.mark.parametrize('attns', [None, ('rala',) * 4], ids=['hybrid', 'linear'])
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_equals_the_equations_written_plainly(attns, training):
    """Values and the gradient of every parameter, with stored and with batch statistics."""
    model = goldens.fill(RAVLT(ARCH, stage_attns=attns, drop_path_rate=0.0)).double().train(training)
    x = image().double()
    outs, literal = model(x), literal_ravlt.forward(model, x)
    for out, expected in zip(outs, literal):
        torch.testing.assert_close(out, expected)
    probes = [torch.randn_like(out) for out in outs]
    parameters = list(model.parameters())
    ours = torch.autograd.grad(outs, parameters, probes)
    for mine, other in zip(ours, torch.autograd.grad(literal, parameters, probes)):
        torch.testing.assert_close(mine, other, atol=1e-8, rtol=1e-6)


def linear(**options):
    return dict(stage_attns=(dict(type='rala', **options),) * 4)


ABLATIONS = {
    'without KV augmentation': linear(augment_kv=False),
    'without output augmentation': linear(output_gate=None),
    'identity': linear(output_gate='identity'),
    'tanh': linear(output_gate='tanh'),
    'relu': linear(kernel='relu'),
    'softmax': linear(kernel='softmax'),
    'scale of the paper': linear(scale_weights=False),
    'without CPE': dict(cpe=False),
    'without rotary encoding': dict(rotary=False),
    'without local term': dict(local_kernel=None),
}


@pytest.mark.parametrize('options', ABLATIONS.values(), ids=ABLATIONS)
def test_ablations_of_the_paper_are_arguments(options):
    """Each is another function than the default, and trains as a whole."""
    default = goldens.fill(RAVLT(ARCH, **(linear() if 'stage_attns' in options else {})))
    model = RAVLT(ARCH, **options)
    state = default.state_dict()
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    # the gate's rows are the last of the projection's
    model.load_state_dict({k: state[k][: s[0]] if s else state[k] for k, s in shapes.items()})
    model.norm_eval = default.norm_eval = True
    x = image()
    outs = model.train()(x)
    sum(out.square().mean() for out in outs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    difference = (model.eval()(x)[-1] - default.eval()(x)[-1]).abs().max()
    assert difference > 1e-3


def test_the_plain_form_of_the_paper_has_no_rotary_and_no_local_weights():
    model = RAVLT(ARCH, rotary=False, local_kernel=None, cpe=False, stage_attns=('rala',) * 4)
    keys = ' '.join(model.state_dict())
    assert '.local.' not in keys and '.position.' not in keys
    assert model.shared(0, torch.zeros(1, 8, 8, 8)) == {}


@pytest.mark.parametrize(
    ('dtype', 'angles'),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2],
    ids=str,
)
def test_angles_of_long_maps_are_exact_in_half_precision(dtype, angles):
    """bfloat16 counts to 256: the columns after it would share their angles."""
    model = RAVLT(ARCH)
    table = model.shared(1, torch.zeros(1, 2, 300, 16, dtype=dtype))['rotary']
    assert table.dtype == angles and table.shape == (600, 4, 2)
    # of a head of 8 channels, the third pair turns by one radian a column
    for column in (1, 255, 257, 299):
        expected = torch.tensor([math.cos(column), math.sin(column)])
        torch.testing.assert_close(table[column, 2].float(), expected, rtol=0, atol=1e-4)


def test_frozen_batch_norm_through_norm_cfg():
    model = RAVLT(ARCH, norm_cfg=dict(type='BN', requires_grad=False))
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and not any(p.requires_grad for m in norms for p in m.parameters())
