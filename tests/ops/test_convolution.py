# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn.functional as F
from helpers.attentions import FORMS, form
from hypothesis import given, settings
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
    """Compare values and gradients on the CPU path and on the path of other devices."""
    for which in FORMS[:2]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        references = [t.clone().requires_grad_() for t in tensors]
        with form(which):
            out, plain = function(*leaves), expected(*references)
            torch.testing.assert_close(out, plain)
            ours, theirs = (torch.autograd.grad(t.sin().sum(), x) for t, x in ((out, leaves), (plain, references)))
            torch.testing.assert_close(ours, theirs)
            with torch.inference_mode():
                torch.testing.assert_close(function(*tensors), plain.detach())
        assert all(map(torch.equal, leaves, tensors))


@draws
@given(maps(fewest=1), st.sampled_from([3, 5]))
def test_kernels_of_each_image_are_its_own(x, size):
    kernels = torch.randn(*x.shape[:2], size, size, dtype=x.dtype)

    def plain(x, kernels):
        return torch.cat([F.conv2d(one[None], k[:, None], padding=size // 2, groups=4) for one, k in zip(x, kernels)])

    for choice in ('auto', 'reference'):
        with ops.use(choice):
            compare(ops.dynamic_depthwise_conv2d, plain, x, kernels)


@draws
@given(maps(), st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 4)]), st.sampled_from([1, 3, 5]), st.booleans())
def test_convolutions_of_gelu(x, steps, size, residual):
    stride, groups = (1, steps[1]) if residual else steps
    dim = 4 if residual else 8
    weight, bias = torch.randn(dim, 4 // groups, size, size, dtype=x.dtype), torch.randn(dim, dtype=x.dtype)

    def plain(x, weight, bias):
        out = F.conv2d(F.gelu(x), weight, bias, stride, size // 2, 1, groups)
        return F.gelu(x) + out if residual else out

    compare(lambda *t: ops.conv_of_gelu(*t, stride, size // 2, 1, groups, residual), plain, x, weight, bias)
