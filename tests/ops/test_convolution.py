# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn.functional as F
from attentions import FORMS, form
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmlinattn import ops

pytestmark = pytest.mark.usefixtures('fast_forms')
draws = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def maps(draw, fewest=0):
    shape = draw(st.integers(fewest, 3)), 4, draw(st.integers(1, 9)), draw(st.integers(1, 9))
    format = draw(st.sampled_from([torch.channels_last, torch.contiguous_format]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).contiguous(memory_format=format)


def compare(function, expected, *tensors):
    """Values with and without gradients, and gradients of a sum that weighs all results differently, of the forms of
    this device and of others."""
    for which in FORMS[:2]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        twins = [t.clone().requires_grad_() for t in tensors]
        with form(which):
            out, plain = function(*leaves), expected(*twins)
            torch.testing.assert_close(out, plain)
            ours, theirs = (torch.autograd.grad(t.sin().sum(), x) for t, x in ((out, leaves), (plain, twins)))
            torch.testing.assert_close(ours, theirs)
            with torch.inference_mode():
                torch.testing.assert_close(function(*tensors), plain.detach())
        assert all(map(torch.equal, leaves, tensors))


LARGE = torch.randn(1, 4, 366, 365, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@draws
@example(LARGE, 5, True, True)
@example(LARGE, 7, False, False)
@example(LARGE, 9, False, True)
@given(maps(), st.sampled_from([1, 3, 5, 7, 9]), st.booleans(), st.booleans())
def test_depthwise_convolutions(x, size, onto, bias):
    """Alone, or added to another map."""
    tensors = [x, torch.randn(4, 1, size, size, dtype=x.dtype)] + [torch.randn(4, dtype=x.dtype)] * bias
    tensors += [torch.randn(x.shape, dtype=x.dtype).contiguous(memory_format=torch.channels_last)] * onto

    def ours(x, weight, *rest):
        return ops.depthwise_conv2d(x, weight, rest[0] if bias else None, *rest[bias:])

    def plain(x, weight, *rest):
        return sum(rest[bias:], F.conv2d(x, weight, rest[0] if bias else None, padding=size // 2, groups=4))

    compare(ours, plain, *tensors)


@draws
@given(maps(), st.sampled_from([3, 5]), st.booleans())
def test_a_convolution_beside_what_it_convolves(x, size, of_gelu):
    def plain(x, weight, bias):
        x = F.gelu(x) if of_gelu else x
        return x + F.conv2d(x, weight, bias, padding=size // 2, groups=4)

    weight, bias = torch.randn(4, 1, size, size, dtype=x.dtype), torch.randn(4, dtype=x.dtype)
    compare(lambda *t: ops.residual_depthwise_conv2d(*t, of_gelu), plain, x, weight, bias)


@draws
@given(maps(fewest=1), st.sampled_from([3, 5]), st.booleans())
def test_kernels_of_each_image_are_its_own(x, size, onto):
    tensors = [x, torch.randn(*x.shape[:2], size, size, dtype=x.dtype)]
    tensors += [torch.randn(x.shape, dtype=x.dtype).contiguous(memory_format=torch.channels_last)] * onto

    def plain(x, kernels, *other):
        each = [F.conv2d(one[None], k[:, None], padding=size // 2, groups=4) for one, k in zip(x, kernels)]
        return sum(other, torch.cat(each))

    for choice in ('auto', 'reference'):
        with ops.use(choice):
            compare(ops.dynamic_depthwise_conv2d, plain, *tensors)


@draws
@given(maps(), st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4)]), st.sampled_from([1, 3]))
def test_convolutions_of_gelu(x, steps, size):
    stride, groups = steps
    weight, bias = torch.randn(8, 4 // groups, size, size, dtype=x.dtype), torch.randn(8, dtype=x.dtype)

    def convolved(x, weight, bias):
        return F.conv2d(x, weight, bias, stride, size // 2, 1, groups)

    compare(lambda *t: ops.conv_of_gelu(*t, stride, groups), lambda x, *t: convolved(F.gelu(x), *t), x, weight, bias)


@pytest.mark.parametrize('choice', ['auto', 'reference'])
def test_half_precision_adds_the_input_after_the_convolution(choice):
    """A tap of the kernel would round the residual stream."""
    x = torch.full((1, 4, 3, 3), 257.0, dtype=torch.bfloat16)
    x[0, 0, 0, 0] = 1 / 3
    with ops.use(choice):
        out = ops.residual_depthwise_conv2d(x, torch.zeros(4, 1, 3, 3).bfloat16(), torch.zeros(4).bfloat16())
    assert torch.equal(out, x)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('learns', [False, True])
def test_under_autocast(dtype, learns):
    x = torch.randn(2, 4, 8, 7).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_(learns)
    weight, kernels = torch.randn(4, 1, 5, 5, requires_grad=learns), torch.randn(2, 4, 3, 3)
    expected = F.conv2d(x.float(), weight, padding=2, groups=4)
    with torch.set_grad_enabled(learns), torch.autocast('cpu', torch.bfloat16):
        outs = [ops.depthwise_conv2d(x, weight), ops.depthwise_conv2d(x, weight, onto=torch.zeros_like(x))]
        dynamic = ops.dynamic_depthwise_conv2d(x, kernels.to(dtype))
    for out in outs:
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.2)
    assert outs[0].dtype == torch.bfloat16 and dynamic.isfinite().all()
    if learns:
        (grad,) = torch.autograd.grad(outs[0].float().sum(), weight)
        assert grad.dtype == torch.float32 and grad.isfinite().all()
