# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Analytic backends of the ops against their reference implementations in inference; gradients: tests/attention."""

import pytest
import torch
from helpers.attentions import ATTENTIONS, FORMS, form
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlinattn import ops

pytestmark = pytest.mark.usefixtures('fast_forms')
every_attention = pytest.mark.parametrize('name', ATTENTIONS)


@every_attention
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    *(st.integers(1, most) for most in (3, 30, 3)),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_inference_is_the_reference_in_float64_up_to_rounding(name, batch, count, heads, masked, dtype):
    """Compare in each dtype, and leave the inputs, slices of a projection, unchanged."""
    q, k, v = torch.randn(batch, count, 3 * heads * 4, dtype=torch.float64).chunk(3, dim=-1)
    mask = torch.arange(count) < torch.randint(0, count + 1, (batch, 1)) if masked else None
    v, options = v if mask is None else v * mask[..., None], dict(num_heads=heads, mask=mask)
    with ops.use('reference'):
        exact = ATTENTIONS[name](q, k, v, **options)
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
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
