# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions by GPU kernels; run as ``triton_checks.py`` is."""

import pytest
import torch
from triton_checks import TOLERANCE, adversary, assert_follows, distance, normal  # noqa: F401

from mmlinattn.ops.convolution import depthwise_conv2d_reference, sum_of_shifts
from mmlinattn.ops.triton import depthwise as kernels
from mmlinattn.ops.triton.depthwise_op import op, op_backward


def image(batch, channels, height, width, dtype=torch.float32):
    """A channels-last map, a slice of a projection."""
    x = normal(batch, height, width, channels * 3, dtype=dtype)
    return x[..., channels : 2 * channels].permute(0, 3, 1, 2)


@pytest.mark.parametrize('dtype', list(TOLERANCE), ids=str)
@pytest.mark.parametrize('size', [3, pytest.param(5, marks=pytest.mark.slow)])
def test_depthwise(size, dtype):
    tensors = [image(2, 20, 5, 11, dtype), normal(20, 1, size, size, dtype=dtype), normal(20, dtype=dtype)]
    assert_follows(kernels.depthwise_conv2d, depthwise_conv2d_reference, tensors)


@pytest.mark.parametrize('of_gelu', [False, True])
def test_with_its_input_added(of_gelu):
    def plain(x, weight, bias):
        x = torch.nn.functional.gelu(x) if of_gelu else x
        return x + depthwise_conv2d_reference(x, weight, bias)

    tensors = [normal(1, 9, 2, 70).permute(0, 3, 1, 2), normal(70, 1, 3, 3), normal(70)]
    assert_follows(lambda *t: kernels.residual_depthwise_conv2d(*t, of_gelu), plain, tensors)


@pytest.mark.parametrize(
    'batch, height, width', [(3, 6, 7), (1, 1, 1), pytest.param(1, 23, 24, marks=pytest.mark.slow)]
)
def test_kernels_of_each_image(batch, height, width):
    tensors = [image(batch, 8, height, width), normal(batch, 8, 3, 3)]
    assert_follows(kernels.dynamic_depthwise_conv2d, sum_of_shifts, tensors)


@pytest.mark.slow
def test_registration():
    x, weight, bias = (t.requires_grad_() for t in (image(2, 8, 4, 5), normal(1, 8, 3, 3), normal(8)))
    for options in ((False, False), (True, True)):
        torch.library.opcheck(op, (x, weight, bias, *options))
        args = (torch.randn_like(x), x.detach(), weight.detach(), *options)
        torch.library.opcheck(op_backward, args, test_utils=('test_schema', 'test_faketensor'))


def test_second_derivatives():
    x, weight, bias = image(2, 4, 4, 5).requires_grad_(), normal(4, 1, 3, 3), normal(4)
    results = []
    for convolve in (kernels.depthwise_conv2d, depthwise_conv2d_reference):
        (grad,) = torch.autograd.grad(convolve(x, weight, bias).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x)[0])
    assert distance(*results) < 1e-4
