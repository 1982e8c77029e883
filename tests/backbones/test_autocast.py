# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Autocast with the weights of a stage cast together, as on a GPU."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import small_backbones
from helpers.small_backbones import ARCHS, Adapter, build, image, mixes, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmlinattn import forward_pass
from mmlinattn.forward_pass import CastTogether
from mmlinattn.ops import dispatch, leaves

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def on_gpu():
    with dispatch.as_on_gpu():
        yield


def step(model, x, dtype=HALF):
    """Return outputs and gradients of a training step under autocast to ``dtype`` (None: without autocast)."""
    model.zero_grad()
    with torch.autocast('cpu', dtype, enabled=dtype is not None):
        outs = model(x)
    small_backbones.loss(outs).backward()
    return [out.detach() for out in outs], {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def casts(monkeypatch):
    sizes, cast = [], CastTogether.forward
    counted = staticmethod(lambda ctx, dtype, *weights: sizes.append(len(weights)) or cast(ctx, dtype, *weights))
    monkeypatch.setattr(CastTogether, 'forward', counted)
    return sizes


def plain(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        for ours, theirs in ((leaves.Linear, nn.Linear), (leaves.Conv2d, nn.Conv2d), (leaves.LayerNorm, nn.LayerNorm)):
            module.__class__ = theirs if type(module) is ours else type(module)
    return model


@pytest.mark.parametrize(('backbone', 'attns'), [*small_backbones.every_mix()])
def test_as_near_float64_as_autocast_alone(backbone, attns, casts):
    """Compare the median errors of three images, as the ratio of two rounding errors varies."""
    model, excess, ratios = build(backbone, stage_attns=attns, drop_path_rate=0.0).train(), [], []
    for seed in range(3):
        torch.manual_seed(seed)
        x = image()
        exact, theirs = step(copy.deepcopy(model).double(), x.double(), None), step(plain(model), x)
        casts.clear()
        ours = step(model, x)
        assert casts and [out.dtype for out in ours[0]] == [out.dtype for out in theirs[0]]
        assert all(grad.dtype == torch.float32 for grad in ours[1].values())
        excess.append(relative_error(ours[0], exact[0]) - 1.25 * relative_error(theirs[0], exact[0]))
        wide, expected, found = (
            [torch.cat([g.flatten() for g in grads.values()])] for _, grads in (exact, theirs, ours)
        )
        ratios.append(relative_error(found, wide) / relative_error(expected, wide))
    assert sorted(excess)[1] < 1e-3 and sorted(ratios)[1] < 1.25


def recomputed(model, x):
    model.with_cp = True


def recomputed_by_others(model, x):
    for block in model.blocks if hasattr(model, 'blocks') else model.stages[0]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def changed(model, x):
    step(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def moved(model, x):
    step(model, x)
    step(model.double(), x.double())
    model.float()


@pytest.mark.parametrize('change', [recomputed, recomputed_by_others, changed, moved])
@pytest.mark.parametrize('backbone', ARCHS)
def test_results_are_those_of_casts_by_layer(backbone, change, casts):
    model, x = build(backbone, 'rala', drop_path_rate=0.0).train(), image()
    change(model, x)
    with mock.patch.object(forward_pass, 'weights_of', lambda backbone: []):
        expected = step(model, x)
    casts.clear()
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
    assert casts


@pytest.mark.parametrize('backbone', ['RAVLT', 'LinearSwin'])
def test_frozen_weights_get_no_gradient(backbone, casts):
    model = build(backbone, mixes(backbone)[-1][0], frozen_stages=1).train()
    model.stages[2][0].ffn.fc1.weight.requires_grad_(False)
    _, grads = step(model, image())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert casts and 'stages.2.0.ffn.fc1.weight' in frozen
    assert {name for name, grad in grads.items() if grad is None} == frozen


def test_casts_end_with_the_pass(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    before = model.stages[1][0].attn.qkv.bias
    model.stages[1][0].attn.qkv.bias = nn.Parameter(torch.zeros(3))  # fits no product
    with pytest.raises(RuntimeError):
        step(model, x)
    model.stages[1][0].attn.qkv.bias = before
    step(model, x)
    assert casts and not leaves.casts.found and not torch.is_autocast_enabled('cpu')


def test_changed_layers_keep_the_casts_of_the_others(casts):
    """Add a hook, an adapter, a subclass and a replaced parameter. The unchanged leaves are still cast together."""
    model, x = build('LinearSwin', 'inline', drop_path_rate=0.0).train(), image()
    step(model, x)
    count, seen, (first, second) = sum(casts), [], model.stages[2]
    proj = first.attn.proj
    first.attn.qkv.register_forward_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    first.attn.proj = Adapter(proj, nn.Sequential(nn.Linear(proj.in_features, 2), nn.Linear(2, proj.out_features)))
    first.attn.mixer.__class__ = type('Own', (type(first.attn.mixer),), {})
    second.ffn.fc1.weight = nn.Parameter(2 * second.ffn.fc1.weight.detach())
    del casts[:]
    _, grads = step(model, x)
    assert sum(casts) == count and seen == [torch.float32]
    assert grads['stages.2.0.attn.proj.delta.1.weight'].abs().sum() > 0
    exact = step(copy.deepcopy(model).double(), x.double(), None)[1]
    assert relative_error([grads['stages.2.1.ffn.fc1.weight']], [exact['stages.2.1.ffn.fc1.weight']]) < 0.1


def test_gradients_of_gradients(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    weight, found = model.stages[3][0].ffn.fc1.weight, []
    for weights_of in (forward_pass.weights_of, lambda backbone: []):
        with mock.patch.object(forward_pass, 'weights_of', weights_of), torch.autocast('cpu', HALF):
            out = model(x)[-1].float().square().sum()
        (grad,) = torch.autograd.grad(out, weight, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), weight))
    torch.testing.assert_close(*found)
    assert casts and found[0][0].abs().sum() > 0


def test_graphs_are_those_of_autocast(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    with torch.autocast('cpu', HALF):
        compiled = torch.compile(model, backend='eager')(x)
        assert not casts
        expected = model(x)
    assert casts
    assert relative_error(compiled, expected) < 0.05
