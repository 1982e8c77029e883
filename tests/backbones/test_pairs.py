# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention in every backbone: any size, any batch, half precision, hooks, recomputed blocks, copies."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
from helpers import small_backbones
from helpers.small_backbones import ARCHS, EVERY_ATTN, image, loss
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn

every_pair = pytest.mark.parametrize(('backbone', 'attn'), itertools.product(ARCHS, EVERY_ATTN))
every_mix = pytest.mark.parametrize(('backbone', 'stage_attns'), [*small_backbones.every_mix()])
few = settings(deadline=None, derandomize=True, max_examples=2, suppress_health_check=[HealthCheck.too_slow])


@functools.lru_cache(maxsize=1)
def model_of(backbone, attn):
    return small_backbones.build(backbone, attn).double()


def assert_trains(model, x, dtype, loss_scale=2**10):
    with torch.autocast('cpu', dtype):
        outs = model(x)
    assert all(out.isfinite().all() for out in outs)
    (loss(outs) * loss_scale).backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad


@every_pair
@few
@example(33, 47)
@example(32, 32)
@example(32, 130)
@given(st.integers(32, 100), st.integers(32, 100))
def test_maps_of_any_size(backbone, attn, height, width):
    with torch.no_grad():
        outs = model_of(backbone, attn).eval()(image(2, height, width).double())
    assert isinstance(outs, tuple) and all(out.is_contiguous() for out in outs)
    strides = (16,) if backbone == 'LinearDeiT' else (4, 8, 16, 32)
    assert [out.shape[2:] for out in outs] == [(-(-height // stride), -(-width // stride)) for stride in strides]


@every_mix
def test_an_image_alone_is_as_in_a_batch_of_another_layout(backbone, stage_attns):
    model, x = small_backbones.build(backbone, stage_attns=stage_attns).double().eval(), image(2, 43, 57).double()
    x = x * torch.tensor([30.0, 0.01]).double().view(2, 1, 1, 1)
    with torch.no_grad():
        outs, alone = model(x.to(memory_format=torch.channels_last)), model(x[1:])
    torch.testing.assert_close(tuple(out[1:] for out in outs), alone)


@pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])
@every_mix
def test_a_batch_of_no_images_gives_empty_maps(backbone, stage_attns, training):
    model = small_backbones.build(backbone, stage_attns=stage_attns, norm_eval=True).train(training)
    with torch.set_grad_enabled(training):
        outs, empty = model(image(1)), model(image(0))
    assert [out.shape for out in empty] == [(0, *out.shape[1:]) for out in outs]
    if training:
        sum(out.sum() for out in empty).backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@every_mix
def test_half_precision_is_finite_and_close_to_float32(backbone, stage_attns, dtype):
    """Compare the median of five images: rounding decides if a query without a key is zero or a mean of values."""
    model, x = small_backbones.build(backbone, stage_attns=stage_attns), image(5, 64, 80)
    assert_trains(model.train(), x[:3], dtype)
    assert_trains(model, 100 * x[:3], dtype, loss_scale=1)
    model.eval()
    with torch.no_grad():
        exact = model(x)
        with torch.autocast('cpu', dtype):
            found = [*model(x)]
        if stage_attns == small_backbones.mixes(backbone)[-1]:
            found += model.to(dtype)(x.to(dtype))
            assert all(out.dtype == dtype for out in found[len(exact) :])
    for out, expected in zip(found, exact * 2):
        deviation = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert deviation.median() < 6 * torch.finfo(dtype).eps


PUBLISHED = [
    *(('RAVLT', 'tiny'), ('LinearPVT', 'inline-tiny'), ('LinearPVTv2', 'hmhsa-b1'), ('LinearCSWin', 'flatten-tiny')),
    *(
        pytest.param(name, arch, marks=pytest.mark.slow)
        for name in ('LinearSwin', 'LinearDeiT')
        for arch in MODELS.get(name).arch_zoo
        if arch.endswith('-tiny')
    ),
]


@pytest.mark.parametrize(('backbone', 'arch'), PUBLISHED, ids=str)
def test_autocast_is_finite_at_published_depths(backbone, arch):
    """Train published sizes; detector sizes: tests/test_cuda.py, and below."""
    options = dict(out_type='featmap') if backbone == 'LinearDeiT' else {}
    model = MODELS.build(dict(type=backbone, arch=arch, **options)).train()
    assert_trains(model, image(2, 64, 64), torch.bfloat16)
    if backbone == 'RAVLT':  # CPUs have few float16 kernels
        assert_trains(model, image(2, 32, 32), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('backbone', 'attn'),
    [*(('RAVLT', attn) for attn in ('inline', 'focused', 'rala')), *zip(list(ARCHS)[1:], ['focused', 'rala'] * 3)],
)
def test_float16_is_finite_at_the_size_of_a_detector(backbone, attn):
    """Train small models in float16 at 800x1333, as the range depends on the number of tokens."""
    assert_trains(small_backbones.build(backbone, attn).train(), torch.randn(1, 3, 800, 1333), torch.float16)


def layers_of(model):
    kinds = nn.Linear, nn.Conv2d, _BatchNorm, nn.LayerNorm
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


@every_mix
@torch.no_grad()
def test_layers_are_called_under_hooks_of_all_modules(backbone, stage_attns):
    """Hooks of single layers: test_changed_modules.py. Removing the hook restores the results."""
    arch, x, seen = dict(ARCHS[backbone], ffn=dict(type='compact')), image(1), []
    model = small_backbones.build(backbone, arch=arch, stage_attns=stage_attns).eval()
    expected = model(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    outs = model(x)
    handle.remove()
    assert not [name for name, layer in layers_of(model).items() if layer not in seen]
    torch.testing.assert_close(outs, expected, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, model(x), expected))


@every_mix
def test_recomputed_blocks_give_the_same_gradients(backbone, stage_attns):
    """Draw drop paths equally, and update batch statistics once."""
    options = dict(arch=dict(ARCHS[backbone], ffn=dict(type='compact')), stage_attns=stage_attns, drop_path_rate=0.3)
    plain, saving = (small_backbones.build(backbone, **options).train() for _ in '12')
    saving.set_grad_checkpointing()
    calls, x = [], image()
    blocks = saving.blocks if backbone == 'LinearDeiT' else saving.stages[1]
    blocks[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        torch.manual_seed(3)
        loss(model(x)).backward()
    assert len(calls) == 2
    for (name, mine), (_, other) in zip(plain.named_parameters(), saving.named_parameters()):
        torch.testing.assert_close(mine.grad, other.grad, msg=name)
    for (name, mine), (_, other) in zip(plain.named_buffers(), saving.named_buffers()):
        torch.testing.assert_close(mine, other, msg=name)
        assert not name.endswith('num_batches_tracked') or other == 1


@pytest.mark.parametrize('backbone', ['RAVLT', 'LinearPVTv2'])
def test_several_backward_passes_of_recomputed_blocks(backbone):
    options = dict(arch=dict(ARCHS[backbone], ffn=dict(type='compact')), with_cp=True, drop_path_rate=0.0)
    model = small_backbones.build(backbone, 'rala', **options).train()
    out = loss(model(image()))
    state = {name: value.clone() for name, value in model.named_buffers()}
    first, second = (torch.autograd.grad(out, tuple(model.parameters()), retain_graph=True) for _ in '12')
    torch.testing.assert_close(first, second)
    assert all(torch.equal(value, state[name]) for name, value in model.named_buffers())


@every_mix
def test_copies_after_a_forward_pass(backbone, stage_attns):
    """Let no cached table follow a copy. Weights suffice to fill a model built on the meta device."""
    model, x = small_backbones.build(backbone, stage_attns=stage_attns).eval(), image()
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)[-1]
        another = small_backbones.build(backbone, stage_attns=stage_attns)
        assert keys == list(model.state_dict()) == list(another.state_dict())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x)[-1], expected)
            for parameter in copied.parameters():
                parameter.mul_(1.1)
            assert not torch.allclose(copied(x)[-1], expected)
            assert torch.equal(model(x)[-1], expected)
        with torch.device('meta'):
            empty = MODELS.build(small_backbones.config(backbone, stage_attns=stage_attns)).eval()
        empty.load_state_dict(model.state_dict(), assign=True)
        torch.testing.assert_close(empty(x)[-1], expected)


@pytest.mark.slow
def test_compiled():
    attns = ('rala', 'softmax', 'rala', 'rala')
    model, x = small_backbones.build('RAVLT', stage_attns=attns, out_indices=(0, 1)).eval(), image(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
