# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Analytic gradients: saved tensors, and values under every autograd API."""

from functools import partial

import pytest
import torch
from helpers.attentions import ATTENTIONS, FORMS, LINEAR, form

from mmlinattn import ops

pytestmark = pytest.mark.usefixtures('fast_forms')
by_hand = pytest.mark.parametrize('which', FORMS[:2])
HALF = [torch.float16, torch.bfloat16]


def layer(x, other, v):
    weight = v[0, :8].sin()
    image = x.unflatten(1, (3, 3)).permute(0, 3, 1, 2)
    image = image + ops.conv_of_gelu(image, weight[:, :1, None, None].expand(8, 1, 3, 3), None, 1, 1, groups=8)
    kernel = weight[:, None, :5, None] * weight[:, None, None, :5]
    image = ops.conv_of_gelu(image, kernel, None, 1, 2, groups=8, residual=True)
    tokens = (image.flatten(2).transpose(1, 2) * x.sin() + other).unflatten(-1, (2, 4)).transpose(1, 2)
    return ops.rotate(tokens, ops.rotary_table(3, 3, 4, dtype=x.dtype))


def learned_positions(q, k, v):
    return ops.focused_attention(q, k, v, 2, 0.5 + v[0, 0].square(), 3, offset=q[:1].sin())


# of fused softmax attention, PyTorch has no second derivatives
ALL = {**{name: partial(call, num_heads=2) for name, call in LINEAR.items()}, 'layers': layer}
ALL['focused, learned positions'] = learned_positions
# queries, keys and values made of one tensor, of each other, of slices of a projection
MADE = {
    'q is k is v': lambda x: (x, x, x),
    'k of q': lambda q: (q, q.sin(), q.cos()),
    'v of k': lambda x: (lambda k: (x, k, k.sin()))(x.cos()),
    'slices': lambda x: torch.cat((x, x.sin(), x.cos()), dim=-1).chunk(3, dim=-1),
}


@by_hand
@pytest.mark.parametrize('made', MADE)
@pytest.mark.parametrize('name', ALL)
def test_gradients_of_gradients_and_batched_ones(name, made, which):
    x, results = (torch.rand(2, 9, 8, dtype=torch.float64) + 0.2).requires_grad_(), []
    for choice in (which, 'reference'):
        with form(choice):
            parts = MADE[made](x)
            out = ALL[name](*parts)
            probe = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
            firsts = torch.autograd.grad(out, parts, probe, create_graph=True)
            (first,) = torch.autograd.grad(out, x, probe, create_graph=True)
            (second,) = torch.autograd.grad(first.sin().sum(), x, retain_graph=True)
            probes = torch.stack((probe, probe.sin()))
            (batched,) = torch.autograd.grad(out, x, probes, is_grads_batched=True, retain_graph=True)
            plain = torch.autograd.grad(out, x, probe)
        results.append([*firsts, first, second, batched, *plain])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('name', ALL)
def test_gradients_of_gradients_of_tokens_of_zeros(name):
    """Expect finite second derivatives at zero tokens, such as padding under a gradient penalty."""
    x = torch.rand(2, 9, 8, dtype=torch.float64)
    x[:, 4:6] = 0
    x.requires_grad_()
    (first,) = torch.autograd.grad(ALL[name](x, x, x).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()


@by_hand
@pytest.mark.parametrize('name', ATTENTIONS)
def test_a_backward_pass_under_autocast_is_that_outside(name, which):
    x = torch.randn(2, 9, 8, requires_grad=True)
    grads = []
    for inside in (False, True):
        with form(which):
            out = ATTENTIONS[name](x, x + 0.1, x, 2)
            with torch.autocast('cpu', torch.bfloat16, enabled=inside):
                grads.append(torch.autograd.grad(out.sum(), x)[0])
    torch.testing.assert_close(*grads, rtol=1e-5 if 'softmax' not in name else 0.1, atol=1e-5)


@pytest.mark.parametrize('which', FORMS)
@pytest.mark.parametrize('where', range(3))
@pytest.mark.parametrize('name', LINEAR)
def test_nan_of_an_input_shows_in_the_output(name, where, which):
    tensors = [torch.rand(1, 9, 8) for _ in range(3)]
    tensors[where][0, 4, 3] = torch.nan
    with torch.no_grad(), form(which):
        assert ATTENTIONS[name](*tensors, 2)[0, 4].isnan().any()


@pytest.mark.parametrize('which', FORMS)
def test_queries_and_keys_of_zero_learn(which):
    """Expect ELU's slope of 1 at zero, as pruned channels have it."""
    x = torch.randn(3, 1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:2, :, :, :3] = 0
    near = x + 1e-9 * (x == 0)
    with form(which):
        grads, others = (
            torch.autograd.grad(ops.linear_attention(*leaves, 2, 'elu').sin().sum(), leaves)
            for leaves in ([t.clone().requires_grad_() for t in given] for given in (x, near))
        )
    torch.testing.assert_close(grads, others, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('which', FORMS)
@pytest.mark.parametrize(
    'name', ['rala, relu', 'rala, relu, rotary', 'linear, relu', 'focused, 3', 'rala, elu', 'focused, 4.5']
)
def test_a_query_that_meets_no_key_in_float16(name, which):
    """Divide a query by eps alone. Its gradient is finite, and the others are accurate."""
    call = partial(ops.rala, kernel='relu', rotary=ops.rotary_table(3, 3, 8)) if 'rotary' in name else LINEAR[name]
    x = torch.randn(3, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = x
    k[..., :2], q[:, 4], q[:, 4, :2] = -1, -1, 2
    leaves = [t.half().requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with form(which):
        grads = torch.autograd.grad(call(*leaves, 1).float().sum() * 64, leaves)
    assert all(grad.isfinite().all() for grad in grads)
    others = torch.arange(9) != 4
    expected = torch.autograd.grad(call(*wide, 1).sum() * 64, wide)
    for ours, theirs in zip(grads[:1] + grads[2:], expected[:1] + expected[2:]):
        error = (ours.double() - theirs)[:, others].norm()
        assert error < 0.02 * (theirs[:, others].norm() + 1e-3)


@pytest.mark.parametrize('which', FORMS)
def test_keys_with_a_mean_of_a_hundred_deviations(which):
    """Expect InLine attention to depend on deviations from the mean key only."""
    q, k, v = (torch.randn(2, 4000, 16) for _ in range(3))
    k = k + 100
    leaves, wide = ([t.to(dtype).requires_grad_() for t in (q, k, v)] for dtype in (torch.float32, torch.float64))
    with form(which):
        out = ops.inline_attention(*leaves, 2, 0.3)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    exact = ops.inline_attention(*wide, 2, 0.3)
    deviation = (exact - wide[2].mean(dim=1, keepdim=True)).abs().max()
    assert (out - exact).abs().max() < 1e-4 * deviation
    for ours, theirs in zip(grads, torch.autograd.grad(exact.square().sum(), wide)):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@by_hand
@pytest.mark.parametrize('dtype', [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize('name', LINEAR)
def test_tensors_kept_besides_queries_keys_and_values(name, dtype, which):
    """Save at most a tenth of the queries, whatever the device; a rotary encoding adds its rotated map."""
    leaves = [torch.randn(1, 4096, 128).to(dtype).requires_grad_() for _ in range(3)]
    storages, own = {}, {t.untyped_storage().data_ptr() for t in leaves}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with form(which), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = LINEAR[name](*leaves, 2)
    storages.pop(out.untyped_storage().data_ptr(), None)
    most = 0.1 * leaves[0].numel() * dtype.itemsize + (4096 * 64 * 4 if 'rotary' in name else 0)
    assert sum(storages.values()) <= most
