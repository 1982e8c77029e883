# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Autocast with the weights of a stage cast together, as on a GPU."""

import copy

import pytest
import torch
from helpers import small_backbones
from helpers.small_backbones import ARCHS, Adapter, build, image, mixes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


def error(found, exact):
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in zip(found, exact))


@pytest.mark.parametrize(('backbone', 'attns'), [*small_backbones.every_mix()])
def test_outputs_are_as_near_float64_as_those_of_autocast(backbone, attns, casts):
    """Compare the median error of three images, as the ratio of two rounding errors varies."""
    model, excess = build(backbone, stage_attns=attns, drop_path_rate=0.0).train(), []
    for seed in range(3):
        torch.manual_seed(seed)
        x = image()
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast('cpu', HALF):
            theirs = plain(model)(x)
            casts.clear()
            ours = model(x)
        assert casts and [out.dtype for out in ours] == [out.dtype for out in theirs]
        excess.append(error(ours, exact) - 1.25 * error(theirs, exact))
    assert sorted(excess)[1] < 1e-3


@pytest.mark.parametrize('backbone', ARCHS)
def test_gradients_are_as_near_float64_as_those_of_autocast(backbone):
    """Compare the median error of three models, as rounding may flip the sign of a gradient."""
    ratios = []
    for seed in range(3):
        torch.manual_seed(seed)
        model, x = build(backbone, stage_attns=mixes(backbone)[-1], drop_path_rate=0.0).train(), image()
        steps = step(copy.deepcopy(model).double(), x.double(), None), step(plain(model), x), step(model, x)
        exact, theirs, ours = (torch.cat([grad.flatten() for grad in grads.values()]) for _, grads in steps)
        ratios.append(error([ours], [exact]) / error([theirs], [exact]))
        assert all(grad.dtype == torch.float32 for grad in steps[-1][1].values())
    assert sorted(ratios)[1] < 1.25


@pytest.mark.parametrize('backbone', ARCHS)
def test_recomputed_blocks_have_the_same_gradients(backbone, casts):
    options, x = dict(stage_attns=mixes(backbone)[-1], drop_path_rate=0.0), image()
    found = [step(build(backbone, with_cp=cp, **options).train(), x) for cp in (False, True)]
    assert casts
    torch.testing.assert_close(*found, rtol=0, atol=0)


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
    assert error([grads['stages.2.1.ffn.fc1.weight']], [exact['stages.2.1.ffn.fc1.weight']]) < 0.1


def test_a_cast_is_a_cache(monkeypatch):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    expected = step(copy.deepcopy(model), x)
    monkeypatch.setattr(forward_pass, 'weights_of', lambda backbone: [])
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)


def test_blocks_recomputed_by_others(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    expected = step(copy.deepcopy(model), x)
    block = model.stages[0][0]
    forward = block.forward
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)


def test_a_copy_between_forward_and_backward(casts):
    model, x = build('RAVLT', 'softmax', drop_path_rate=0.0).train(), image()
    expected = step(model, x)
    with torch.autocast('cpu', HALF):
        outs = model(x)
        copied = copy.deepcopy(model)  # as EMA makes one
    model.zero_grad()
    small_backbones.loss(outs).backward()
    assert casts
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected[1], rtol=0, atol=0)
    torch.testing.assert_close(step(copied, x), expected, rtol=0, atol=0)


def test_weights_that_move_or_change_are_those_of_the_next_step(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    step(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(step(model, x), step(copy.deepcopy(model), x), rtol=0, atol=0)
    model.double()
    step(model, x.double())
    count = len(casts)
    step(model.float(), x)
    assert len(casts) > count


def test_gradients_of_gradients():
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    with torch.autocast('cpu', HALF):
        out = model(x)[-1].float().square().sum()
    weight = model.stages[3][0].ffn.fc1.weight
    (grad,) = torch.autograd.grad(out, weight, create_graph=True)
    grad.square().sum().backward()
    assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0


def test_distributed_training(tmp_path, casts):
    model, x = build('LinearSwin', 'focused', drop_path_rate=0.0).train(), image()
    expected = step(copy.deepcopy(model), x)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path / "store"}', rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        for _ in '12':
            _, grads = step(parallel, x)
    finally:
        torch.distributed.destroy_process_group()
    assert len(casts) > 3
    torch.testing.assert_close(list(grads.values()), list(expected[1].values()), rtol=1e-5, atol=1e-6)


def test_graphs_are_those_of_autocast(casts):
    model, x = build('RAVLT', 'rala', drop_path_rate=0.0).train(), image()
    with torch.autocast('cpu', HALF):
        compiled = torch.compile(model, backend='eager')(x)
        assert not casts
        expected = model(x)
    assert casts
    assert error(compiled, [out.double() for out in expected]) < 0.05
