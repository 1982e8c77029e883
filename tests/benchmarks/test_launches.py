# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Kernel launches and Python calls of a step on a GPU, beside MMDetection's Swin-T."""

import functools

import launches
import pytest
import torch
from torch import nn

pytest.importorskip('mmdet')

# 320 pixels: every window pads, as at 640
GOALS = [  # share of the launches of Swin-T in a training step at 224 and at 320 pixels
    ('RAVLT-T', 0.85, 0.85),
    ('RAVLT-T, fully linear', 1.1, 1.1),
    ('InLine-Swin-T', 1.0, 1.1),
    ('FLatten-Swin-T', 1.2, 1.3),
]
PYTHON_CALLS = 2145  # of a forward pass of Swin-T


@functools.cache
def step(name, side):
    with torch.random.fork_rng():
        return launches.backbone_step(launches.build(name, shrink=8), torch.randn(2, 3, side, side))


@pytest.mark.parametrize('side', [224, 320])
@pytest.mark.parametrize(('name', 'small', 'large'), GOALS)
def test_launches_of_a_training_step(name, small, large, side):
    ours, peer = (step(each, side) for each in (name, launches.SWIN))
    ratio = (ours['forward'] + ours['backward']) / (peer['forward'] + peer['backward'])
    assert ratio <= (small if side == 224 else large)


def test_python_calls_of_a_training_forward_pass():
    assert step('RAVLT-T', 224)['forward_calls'] <= PYTHON_CALLS


def test_swin_of_mmdetection():
    found = step(launches.SWIN, 224)
    assert found['forward'] + found['backward'] == pytest.approx(1214, rel=0.03)
    assert found['forward_calls'] == pytest.approx(PYTHON_CALLS, rel=0.03)


def test_counts_of_operators_and_calls():
    """Count one launch per 64 tensors of a foreach copy (two lists), or 110 in place."""
    x, many = torch.randn(4, 6), [torch.zeros(8) for _ in range(100)]
    assert launches.launches(lambda: x.view(6, 4).t()[1:].detach()) == 0
    assert launches.launches(lambda: (torch.empty_like(x), x.new_empty(3))) == 0
    assert launches.launches(lambda: (x + 1, x.sum(), x.to(torch.bfloat16))) == 3
    assert launches.launches(torch._foreach_copy_, many, [torch.ones(8) for _ in many]) == 2
    assert launches.launches(torch._foreach_mul_, many, 2.0) == 1
    assert launches.multi_tensor_launches([torch.empty(65536 * 321, device='meta')], 1) == 2  # and 320 blocks
    assert launches.python_calls(lambda: [abs(i) for i in (1, 2)]) in (1, 2)  # comprehensions are calls up to 3.11
    assert launches.python_calls(abs, 1) == 0


def test_launches_of_the_optimizer():
    """Count 36 parameters per launch of a fused kernel, and 110, 64 or 48 of foreach operators."""
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(72)]
    count = launches.adamw_launches
    assert count(torch.optim.AdamW(weights, fused=True)) == 2
    assert count(torch.optim.AdamW(weights)) == 4 + 2 * 2 + 2 * 2
    assert count(torch.optim.AdamW([dict(params=[weight]) for weight in weights])) == 8 * 72
    with pytest.raises(TypeError, match='optimizer=SGD: expected AdamW'):
        count(torch.optim.SGD(weights))


def test_a_detector_in_parts():
    """Expect the launches of the backbone alone, plus at most 10 for each branch with stochastic depth."""
    import count_traffic
    from mmdet.testing import demo_mm_inputs

    model, _ = count_traffic.detector('RAVLT-T')
    model.roi_head.bbox_sampler.num = 32  # launches do not depend on the number of regions, the time does
    data = demo_mm_inputs(2, [[3, 64, 64]] * 2, num_classes=80, num_items=[3, 3], with_mask=True)
    found = launches.detector_step(model, data)
    alone = step('RAVLT-T', 64)
    dropped = found['backbone'] - alone['forward'] - alone['backward']
    assert 0 <= dropped <= 10 * 22
    assert found['backbone'] <= 1200
    assert 1200 < found['heads'] < 1800
