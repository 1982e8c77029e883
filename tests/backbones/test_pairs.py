# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention in every host: any size, any batch, half precision, graphs, parallel training."""

import copy
import functools
import math
import pickle

import pytest
import torch
from helpers import small_hosts
from helpers.small_hosts import ARCHS, EVERY_ATTN, image, loss
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mmengine.registry import MODELS
from mmengine.utils.dl_utils.parrots_wrapper import _BatchNorm
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

HALF = [torch.float16, torch.bfloat16]
every_pair = pytest.mark.parametrize(
    ('host', 'attn'), [pytest.param(host, attn, id=f'{host}-{attn}') for host in ARCHS for attn in EVERY_ATTN]
)
every_mix = pytest.mark.parametrize(
    ('host', 'stage_attns'),
    [pytest.param(host, mix, id=f'{host}-{i}') for host in ARCHS for i, mix in enumerate(small_hosts.mixes(host))],
)
few = settings(deadline=None, derandomize=True, max_examples=2, suppress_health_check=[HealthCheck.too_slow])


@functools.lru_cache(maxsize=1)
def model_of(host, attn):
    return small_hosts.build(host, attn).double()


def shapes(host, height, width):
    if host == 'LinearDeiT':
        return [(math.ceil(height / 16), math.ceil(width / 16))]
    return [(math.ceil(height / 4 / 2**i), math.ceil(width / 4 / 2**i)) for i in range(4)]


def assert_trains(model, x, dtype, loss_scale=2**10):
    """Train one step with gradients scaled by ``loss_scale``, as by a gradient scaler."""
    with torch.autocast('cpu', dtype):
        outs = model(x)
    assert all(out.isfinite().all() for out in outs)
    (loss(outs) * loss_scale).backward()
    bad = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not bad


# --- sizes and batches --------------------------------------------------------------------------


@every_pair
@few
@example(33, 47)
@example(32, 32)
@example(32, 130)
@given(st.integers(32, 100), st.integers(32, 100))
def test_maps_of_any_size(host, attn, height, width):
    """32x32 leaves a map of one pixel in the last stage, 32x130 one that is a pixel high."""
    with torch.no_grad():
        outs = model_of(host, attn).eval()(image(2, height, width).double())
    assert isinstance(outs, tuple) and all(out.is_contiguous() for out in outs)
    assert [tuple(out.shape[2:]) for out in outs] == shapes(host, height, width)


@every_pair
def test_every_parameter_takes_part(host, attn):
    model = model_of(host, attn).train()
    model.zero_grad()
    sum(out.square().mean() for out in model(image(2, 33, 47).double())).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def inferred(host, stage_attns):
    """A model without gradients."""
    return torch.no_grad()(small_hosts.build(host, stage_attns=stage_attns).double().eval())


@every_mix
def test_an_image_alone_is_as_in_a_batch(host, stage_attns):
    """Whatever the others hold."""
    model, x = inferred(host, stage_attns), image(2, 43, 57).double()
    x = x * torch.tensor([30.0, 0.01]).double().view(2, 1, 1, 1)
    for out, alone in zip(model(x), model(x[1:])):
        torch.testing.assert_close(out[1:], alone)


@every_mix
def test_the_layout_of_an_image_in_memory_does_not_matter(host, stage_attns):
    model, x = inferred(host, stage_attns), image(2, 43, 57).double()
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), model(x))


@pytest.mark.parametrize(
    ('host', 'stage_attns'),
    # not of stems of convolutions
    [(host, mix) for host in ARCHS if host not in ('RAVLT', 'LinearNextViT') for mix in small_hosts.mixes(host)],
)
def test_images_are_padded_to_whole_patches(host, stage_attns):
    """With zeros at the bottom and on the right, and no further: tokens without a pixel would mix with the others."""
    model, x = inferred(host, stage_attns), image(2, 43, 57).double()
    patch = 16 if host == 'LinearDeiT' else 4
    torch.testing.assert_close(model(pad(x, (0, -57 % patch, 0, -43 % patch))), model(x))


@pytest.mark.parametrize('training', [False, True], ids=['inference', 'training'])
@every_mix
def test_a_batch_of_no_images_gives_empty_maps(host, stage_attns, training):
    """As an empty image source, or a filter before the model, gives it."""
    model = small_hosts.build(host, stage_attns=stage_attns, norm_eval=True).train(training)
    with torch.set_grad_enabled(training):
        outs, empty = model(image(1)), model(image(0))
    assert [out.shape for out in empty] == [(0, *out.shape[1:]) for out in outs]
    if training:
        sum(out.sum() for out in empty).backward()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', HALF, ids=str)
@every_mix
def test_half_precision_is_finite_and_close_to_float32(host, stage_attns, dtype):
    """Under autocast, also of inputs 100 times their usual size, as a badly scaled fine-tuning run has them; and of a
    model that is all in half precision, of the mix that rounds least. Long sums: tests/ops/test_range.py.

    The middle one of five images counts. With ReLU as kernel an image can have a query that meets no key: its result
    is zero, and a mean of values once rounding lets the query meet one, in float32, too."""
    model, x = small_hosts.build(host, stage_attns=stage_attns), image(5, 64, 80)
    assert_trains(model.train(), x[:3], dtype)
    assert_trains(model, 100 * x[:3], dtype, loss_scale=1)
    model.eval()
    with torch.no_grad():
        exact = model(x)
        with torch.autocast('cpu', dtype):
            found = [*model(x)]
        if stage_attns == small_hosts.mixes(host)[-1]:
            found += model.to(dtype)(x.to(dtype))
            assert all(out.dtype == dtype for out in found[len(exact) :])
    for out, expected in zip(found, exact * 2):
        deviation = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert deviation.median() < 6 * torch.finfo(dtype).eps


TINY = [f'{attn}-tiny' for attn in EVERY_ATTN]
PUBLISHED = [
    ('RAVLT', 'tiny'),
    *(('LinearPVT', 'inline-tiny'), ('LinearPVTv2', 'hmhsa-b1')),
    ('LinearCSWin', 'flatten-tiny'),
    *((host, arch) for host in ('LinearSwin', 'LinearDeiT') for arch in TINY if arch in MODELS.get(host).arch_zoo),
]


@pytest.mark.parametrize(('host', 'arch'), PUBLISHED, ids=str)
def test_autocast_is_finite_at_published_depths(host, arch):
    """Published widths, each attention at least once. At the size of a detector: tests/test_cuda.py, and below."""
    options = dict(out_type='featmap') if host == 'LinearDeiT' else {}
    model = MODELS.build(dict(type=host, arch=arch, **options)).train()
    assert_trains(model, image(2, 64, 64), torch.bfloat16)
    if host == 'RAVLT':  # CPUs have few float16 kernels
        assert_trains(model, image(2, 32, 32), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('host', 'attn'),
    [*(('RAVLT', attn) for attn in ('inline', 'focused', 'rala')), *zip(list(ARCHS)[1:], ['focused', 'rala'] * 3)],
)
def test_float16_is_finite_at_the_size_of_a_detector(host, attn):
    """Thin models: CPUs compute float16 slowly, and the result depends on the number of tokens."""
    assert_trains(small_hosts.build(host, attn).train(), torch.randn(1, 3, 800, 1333), torch.float16)


# --- hooks, recomputing, copies -----------------------------------------------------------------


def layers_of(model):
    kinds = nn.Linear, nn.Conv2d, _BatchNorm, nn.LayerNorm
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def with_compact(host, stage_attns):
    arch = dict(ARCHS[host], ffn=dict(type='compact'))
    return small_hosts.build(host, arch=arch, stage_attns=stage_attns).eval(), image(1)


@pytest.mark.parametrize('kind', ['forward', 'forward_pre', 'full_backward', 'full_backward_pre', 'module'])
@every_mix
def test_layers_that_somebody_watches_are_called(host, stage_attns, kind):
    """A hook on every layer at once, as profilers, feature extractors and those who shard gradients have it; inference
    writes over nothing that a hook has kept. Once the hooks are gone, results are those of before."""
    (model, x), seen, kept = with_compact(host, stage_attns), [], []

    def hook(module, *tensors):
        seen.append(module)
        if kind == 'forward':
            kept.append((tensors[-1], tensors[-1].detach().clone()))

    for learns in (True, False) if 'backward' not in kind else (True,):
        with torch.set_grad_enabled(learns):
            expected = model(x)
            if kind == 'module':
                handles = [nn.modules.module.register_module_forward_hook(hook)]
            else:
                handles = [getattr(layer, f'register_{kind}_hook')(hook) for layer in layers_of(model).values()]
            outs = model(x)
            if learns:
                loss(outs).backward()
            for handle in handles:
                handle.remove()
            assert not [name for name, layer in layers_of(model).items() if layer not in seen]
            seen.clear()
            torch.testing.assert_close(outs, expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(*pair) for pair in kept)


@every_mix
def test_recomputed_blocks_give_the_same_gradients(host, stage_attns):
    """``with_cp``; dropped paths are drawn again, batch statistics (of rows in compact networks, too) counted once."""
    options = dict(arch=dict(ARCHS[host], ffn=dict(type='compact')), stage_attns=stage_attns, drop_path_rate=0.3)
    plain, saving = (small_hosts.build(host, with_cp=cp, **options).train() for cp in (False, True))
    calls, x = [], image()
    blocks = saving.blocks if host == 'LinearDeiT' else saving.stages[1]
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


@pytest.mark.parametrize('host', ['RAVLT', 'LinearPVTv2'])
def test_several_backward_passes_of_recomputed_blocks(host):
    options = dict(arch=dict(ARCHS[host], ffn=dict(type='compact')), with_cp=True, drop_path_rate=0.0)
    model = small_hosts.build(host, 'rala', **options).train()
    out = loss(model(image()))
    state = {name: value.clone() for name, value in model.named_buffers()}
    first, second = (torch.autograd.grad(out, tuple(model.parameters()), retain_graph=True) for _ in '12')
    torch.testing.assert_close(first, second)
    assert all(torch.equal(value, state[name]) for name, value in model.named_buffers())


@pytest.fixture(scope='module')
def process_group(tmp_path_factory):
    """A group of this process alone: DistributedDataParallel minds unused parameters all the same."""
    store = tmp_path_factory.mktemp('group') / 'store'
    torch.distributed.init_process_group('gloo', init_method=f'file://{store}', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('with_cp', [False, True])
@every_mix
def test_trains_in_parallel_without_find_unused_parameters(process_group, host, stage_attns, with_cp):
    model = small_hosts.build(host, stage_attns=stage_attns, drop_path_rate=0.5, with_cp=with_cp).train()
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # a parameter that the first step left unused is an error in the second
        loss(parallel(image())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_mix
def test_copies_after_a_forward_pass(host, stage_attns):
    """Resized tables that a model keeps do not follow its copies around; one built without memory has all it needs in
    its weights (``torch.device('meta')`` and ``load_state_dict(assign=True)``)."""
    model, x = small_hosts.build(host, stage_attns=stage_attns).eval(), image()
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = model(x)[-1]
        assert keys == list(model.state_dict()) == list(small_hosts.build(host, stage_attns=stage_attns).state_dict())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(x)[-1], expected)
            for parameter in copied.parameters():
                parameter.mul_(1.1)
            assert not torch.allclose(copied(x)[-1], expected)
            assert torch.equal(model(x)[-1], expected)
        with torch.device('meta'):
            empty = MODELS.build(small_hosts.config(host, stage_attns=stage_attns)).eval()
        empty.load_state_dict(model.state_dict(), assign=True)
        torch.testing.assert_close(empty(x)[-1], expected)


@pytest.mark.slow
def test_compiled():
    """Inductor builds C++ code, seconds for a block: of two stages, with one block of each attention."""
    attns = ('rala', 'softmax', 'rala', 'rala')
    model, x = small_hosts.build('RAVLT', stage_attns=attns, out_indices=(0, 1)).eval(), image(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
