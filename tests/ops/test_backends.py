# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Analytic backends of the ops against their reference implementations, in every dtype and layout."""

import pytest
import torch
from helpers.attentions import ATTENTIONS, FORMS, form
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlinattn import ops

pytestmark = pytest.mark.usefixtures('fast_forms')
draws = settings(max_examples=8, deadline=None, derandomize=True, database=None)


every_attention = pytest.mark.parametrize('name', ATTENTIONS)


@st.composite
def inputs(draw):
    """Draw queries, keys and values (B, N, C) as slices of one projection, and ``num_heads`` and ``mask``."""
    batch, tokens, heads = (draw(st.integers(1, most)) for most in (3, 30, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(batch, tokens, 3 * heads * 4, generator=generator, dtype=torch.float64)
    q, k, v = x.chunk(3, dim=-1)
    mask = None
    if draw(st.booleans()):
        mask = torch.arange(tokens) < torch.tensor([[draw(st.integers(0, tokens))] for _ in range(batch)])
        v = v * mask[..., None]
    return [q, k, v], dict(num_heads=heads, mask=mask)


@every_attention
@draws
@given(inputs())
def test_values_and_gradients_are_the_references(name, given):
    tensors, options = given
    # of values that are none, gradients are anything
    real = 1 if options['mask'] is None else options['mask'][..., None]
    found = []
    for which in FORMS:
        q, k, v = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with form(which):
            out = ATTENTIONS[name](q, k, v * real, **options)
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out) + 0.3 * out.detach())])
    for fast in found[:-1]:
        torch.testing.assert_close(fast, found[-1])


@every_attention
@draws
@given(inputs(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_inference_is_the_reference_in_float64_up_to_rounding(name, given, dtype):
    """Compare in each dtype, and leave the inputs unchanged."""
    tensors, options = given
    with ops.use('reference'):
        exact = ATTENTIONS[name](*tensors, **options)
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    kept = [t.clone() for t in (q, k, v)]
    for which in FORMS[:2]:
        with torch.inference_mode(), form(which):
            out = ATTENTIONS[name](q, k, v, **options)
        assert out.dtype == dtype and all(map(torch.equal, (q, k, v), kept))
        error = (out.double() - exact).norm() / exact.norm().clamp(min=1e-3)
        assert error < {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]


@every_attention
def test_a_mask_may_be_written_to_and_be_used_in_inference_before_training(name):
    q, k, v = torch.randn(3, 2, 9, 8).unbind()
    mask = torch.ones(2, 9, dtype=torch.bool)
    with torch.inference_mode():
        ATTENTIONS[name](q, k, v, 2, mask=mask)
    mask[:, 4:] = False
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, expected = (ATTENTIONS[name](q, k, v * mask[..., None], 2, mask=m) for m in (mask, mask.clone()))
    torch.testing.assert_close(out, expected)
    torch.autograd.grad(out.sum(), leaves)


def outcome(name, which, tensors, num_heads):
    """Return the result of an attention, or None if it raises."""
    try:
        with form(which):
            return ATTENTIONS[name](*tensors, num_heads=num_heads)
    except (RuntimeError, ValueError, ZeroDivisionError):
        return None


@every_attention
@pytest.mark.parametrize(
    ('images', 'channels', 'num_heads'),
    [
        ((2, 1, 1), (8, 8, 8), 2),
        ((2, 2, 1), (8, 8, 8), 2),
        ((2, 2, 2), (8, 4, 8), 2),
        ((2, 2, 2), (8, 8, 8), 3),
        ((2, 2, 2), (8, 8, 8), 0),
    ],
    ids=['keys of one image', 'values of one image', 'channels', 'heads', 'no heads'],
)
@pytest.mark.parametrize('learns', [False, True])
def test_shapes_that_do_not_match(name, images, channels, num_heads, learns):
    """Broadcast or raise as the reference does."""
    sizes = zip(images, channels)
    tensors = [torch.randn(count, 6, size, dtype=torch.float64, requires_grad=learns) for count, size in sizes]
    expected = outcome(name, 'reference', tensors, num_heads)
    for which in FORMS[:2]:
        found = outcome(name, which, tensors, num_heads)
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
