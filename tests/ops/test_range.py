# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention at the limits of its dtype: long sums in half precision, dead and huge tokens."""

import pytest
import torch
from helpers.attentions import FORMS, LINEAR, form
from helpers.references import by_head, focused_map, kernel, linear_map, rala_map, side_by_side
from torch import nn

from mmlinattn import ops

pytestmark = pytest.mark.usefixtures('fast_forms')
HALF = [torch.float16, torch.bfloat16]
every_form = pytest.mark.parametrize('which', FORMS)
every_attention = pytest.mark.parametrize('name', LINEAR)


@every_form
@pytest.mark.parametrize(('dtype', 'masked'), [(HALF[0], False), (HALF[0], True), (HALF[1], False)], ids=str)
@every_attention
def test_sums_over_the_tokens_of_a_detection_map(name, dtype, masked, which):
    """Sum 66,800 tokens of mean 1.2 (stage 1 at 1333x800): beyond float16's range, and bfloat16 counts only to 256."""
    q, k, v = (1.2 + 0.3 * torch.randn(1, 200 * 334, 8) for _ in range(3))
    if name == 'hydra':  # keys along one channel, queries not: the sum exceeds 65504, the output does not
        k = k * (torch.arange(8) == 3)
    mask = None
    if masked:
        mask = torch.rand(1, q.shape[1]) > 0.1
        v = v * mask[..., None]
    with form(which):
        out = LINEAR[name](q.to(dtype), k.to(dtype), v.to(dtype), 1, mask=mask)
        exact = LINEAR[name](*(t.to(dtype).double() for t in (q, k, v)), 1, mask=mask)
    assert out.dtype == dtype and out.isfinite().all()
    assert (out - exact).abs().max() < 16 * torch.finfo(dtype).eps * exact.abs().max()


@every_form
@pytest.mark.parametrize('size', [1.0, 1e-3])
@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('name', ['rala, rotary', 'inline, identity', 'linear, elu', 'focused, 3'])
def test_gradients_of_a_detection_map(name, dtype, size, which):
    """Differentiate a scaled sum over 66,800 tokens; 1 / N is subnormal in float16."""
    leaves = [(scale * torch.randn(1, 200 * 334, 16)).to(dtype).requires_grad_() for scale in (1, 1, size)]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    with form(which):
        out, exact, resolution = LINEAR[name](*leaves, 1), LINEAR[name](*wide, 1), 16 * torch.finfo(dtype).eps
    assert out.dtype == dtype and (out - exact).abs().max() < resolution * max(exact.abs().max(), size)
    probe = torch.randn_like(exact) / size
    ours = torch.autograd.grad((out.double() * probe).sum(), leaves)
    for mine, other in zip(ours, torch.autograd.grad((exact * probe).sum(), wide)):
        assert mine.isfinite().all() and (mine - other).norm() < resolution * other.norm()


@every_form
@every_attention
def test_results_have_the_type_of_the_values(name, which):
    q, k, v = (torch.rand(2, 9, 8) + 0.5 for _ in range(3))
    with form(which):
        expected = LINEAR[name](q, k, v, 2)
        for queries, values in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            out = LINEAR[name](q.to(queries), k.to(queries), v.to(values), 2)
            assert out.dtype == values
            torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05 * expected.abs().max().item())
        with torch.autocast('cpu', torch.bfloat16):
            torch.testing.assert_close(LINEAR[name](q, k, v, 2), expected)


@every_form
@pytest.mark.parametrize('channels', [16, 64, 1024])
@pytest.mark.parametrize('power', [1, 1.5, 2, 3, 5.5, 8, 16, 32])
def test_every_power_with_dead_and_huge_tokens(power, channels, which):
    """Include a token of 1e4, one without a positive channel, a flat one, and one with a single positive channel."""
    q, k, v = torch.randn(3, 1, 12, channels)
    for t in (q, k):
        t[:, 0] *= 1e4
        t[:, 1] = -1
        t[:, 2] = 0.7
        t[:, 3] = -1
        t[:, 3, 5] = 3.0
        t[:, 4] *= 1e-6
    scale = torch.linspace(-4, 8, channels)
    leaves = [t.requires_grad_() for t in (q, k, v, scale)]
    with form(which):
        out = ops.focused_attention(*leaves[:3], 4, 1 / nn.functional.softplus(scale), power)
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    q, k, v, scale = (t.detach().double() for t in leaves)
    q, k = (by_head(focused_map(t, scale, power), 4) for t in (q, k))
    exact = side_by_side(linear_map(q, k) @ by_head(v, 4))
    # the powers of the reference underflow beyond; beside tokens of 1e4, 1e-15 of their largest is above 0
    if power <= 16:
        torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


@every_form
@pytest.mark.parametrize(('offset', 'spread'), [(20, 1), (0, 20), (0, 36)])
def test_token_weights_of_large_logits_in_float16(offset, spread, which):
    """Logits of 400, or with a standard deviation of 60 and 100: float16 would round them by up to 0.1."""
    q, k, v = torch.randn(3, 2, 4000, 16).unbind()
    leaves = [t.half().requires_grad_() for t in (q, offset + spread * k, v)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with form(which):
        out, exact = ops.rala(*leaves, 1), ops.rala(*wide, 1)
    grads, others = (torch.autograd.grad(t.double().square().sum(), of) for t, of in ((out, leaves), (exact, wide)))
    assert all((ours - theirs).norm() < 4e-4 * theirs.norm() for ours, theirs in zip((out, *grads), (exact, *others)))


@every_form
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('name', ['rala, elu', 'rala, rotary', 'linear, elu'])
def test_elu_plus_one_keeps_the_digits_of_small_numbers(name, dtype, which):
    """Compute ``exp(x)`` below 0, not ``1 + (exp(x) - 1)``, down to queries as small as the normaliser's eps."""
    k, v = torch.randn(2, 1, 16, 8, dtype=torch.float64)
    for x in (-1.0, -8.0, -12.0, -14.0, -16.0, -18.0, -24.0):
        q = torch.full_like(k, x) - torch.arange(8) / 8
        with ops.use('reference'):
            exact = LINEAR[name](q.exp().log(), k, v, 2)
        with form(which):
            out = LINEAR[name](q.to(dtype), k.to(dtype), v.to(dtype), 2)
        assert (out - exact).norm() < 32 * torch.finfo(dtype).eps * exact.norm()


@every_form
@pytest.mark.parametrize('learns', [True, False])
@pytest.mark.parametrize('eps', [dict(eps=0.5), {}], ids=['large', 'default'])
@pytest.mark.parametrize('name', ['rala, elu', 'rala, relu', 'rala, softmax', 'rala without weights', 'linear, elu'])
def test_the_addend_of_the_normaliser(name, eps, learns, which):
    """Take an eps as large as the normaliser, and 1e-6 beside equally small products. A mask excludes two tokens."""
    options, floor = LINEAR[name].keywords, eps.get('eps', 1e-6)
    phi = options.get('kernel', 'elu')
    q, k, v = torch.randn(3, 2, 7, 8, dtype=torch.float64)
    if not eps:  # kernels shrink these to about 1e-3
        q, k = (t - 8 if phi == 'elu' else t / 1000 for t in (q, k))
    leaves = [t.requires_grad_(learns) for t in (q, k, v)]

    def exact(tokens):
        q, k, v = (by_head(t[:, :tokens], 2) for t in leaves)
        q, k = kernel(q, phi), kernel(k, phi)
        if name == 'linear, elu':
            return side_by_side(linear_map(q, k, eps=floor) @ v)
        return side_by_side(rala_map(q, k, None, options['weight_scale'], floor) @ v)

    mask = (torch.arange(7) < 5).expand(2, 7)
    with form(which), torch.set_grad_enabled(learns):
        q, k, v = leaves
        out = LINEAR[name](q.clone(), k.clone(), v, 2, **eps)
        masked = LINEAR[name](q.clone(), k.clone(), v * mask[..., None], 2, mask=mask, **eps)
    torch.testing.assert_close(out, exact(7))
    torch.testing.assert_close(masked[:, :5], exact(5))
    if learns:
        probe = torch.randn_like(out)
        torch.testing.assert_close(*(torch.autograd.grad(each, leaves, probe) for each in (out, exact(7))))


@every_form
@pytest.mark.parametrize('dtype', HALF, ids=str)
def test_scales_of_the_focused_map_are_not_rounded_to_the_type_of_the_tokens(dtype, which):
    """Keep float32 scales beside half-precision tokens, as under autocast."""
    q, k = torch.randn(2, 2, 7, 8).to(dtype)
    v, scale = torch.randn(2, 7, 8), torch.rand(8) + 0.5
    results = []
    for tokens in ((q, k), (q.float(), k.float())):
        leaves = [t.clone().requires_grad_() for t in (v, scale)]
        with form(which):
            out = ops.focused_attention(*tokens, leaves[0], 2, leaves[1], 3)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@every_form
@pytest.mark.parametrize(('eps', 'size'), [(dict(eps=0.3), 1), ({}, 1e-3)], ids=['large', 'default'])
def test_the_floor_of_the_focused_map_and_its_normaliser(eps, size, which):
    """Add one eps (1e-6 by default) to ReLU's results and to the normaliser. Zeros get no gradient, as in ReLU."""
    q, k, v = torch.randn(3, 2, 7, 8, dtype=torch.float64) * torch.tensor([size, size, 1]).view(3, 1, 1, 1)
    scale, offset = torch.randn(8, dtype=torch.float64), size * torch.randn(1, 7, 8, dtype=torch.float64)
    floor, inverse = eps.get('eps', 1e-6), 1 / nn.functional.softplus(scale)
    mapped = [by_head(focused_map(t, scale, 2, eps=floor), 2) for t in (q, k + offset)]
    expected = side_by_side(linear_map(*mapped, eps=floor) @ by_head(v, 2))
    for learns in (True, False):  # in inference the offset is added in place
        with form(which), torch.set_grad_enabled(learns):
            out = ops.focused_attention(q.clone(), k.clone(), v, 2, inverse, 2, offset=offset, **eps)
        torch.testing.assert_close(out, expected)
    q, k = (torch.where(t > 0, t, 0).requires_grad_() for t in (q, k))
    with form(which):
        grads = torch.autograd.grad(ops.focused_attention(q, k, v, 1, inverse, 3).square().sum(), (q, k))
    assert all((grad[x == 0] == 0).all() and grad[x > 0].any() for x, grad in zip((q, k), grads))
