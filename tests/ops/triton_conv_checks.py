# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Depth-wise convolutions by GPU kernels; run as ``triton_checks.py`` is."""

import pytest
import torch
from triton_checks import DEVICE, TOLERANCE, adversary, distance  # noqa: F401

from mmlinattn.ops.convolution import depthwise_conv2d_reference, sum_of_shifts
from mmlinattn.ops.triton import depthwise as kernels
from mmlinattn.ops.triton.depthwise_op import op, op_backward


def image(batch, channels, height, width, dtype=torch.float32, of_slice=False):
    """A channels-last map, or a slice of a projection seen as one."""
    x = torch.randn(batch, height, width, channels * (3 if of_slice else 1), device=DEVICE).to(dtype)
    return x[..., channels : 2 * channels].detach().permute(0, 3, 1, 2) if of_slice else x.permute(0, 3, 1, 2)


def residual(x, weight, bias, of_gelu=False):
    x = torch.nn.functional.gelu(x) if of_gelu else x
    return x + depthwise_conv2d_reference(x, weight, bias)


def assert_follows(ours, theirs, leaves, same_kernel=True):
    leaves = [leaf.requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, expected = ours(*leaves), theirs(*wide)
    assert out.shape == expected.shape and out.permute(0, 2, 3, 1).is_contiguous()
    assert ('mmlinattn' in str(out.grad_fn)) == same_kernel
    probe = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, probe)
    expected_grads = torch.autograd.grad(expected, wide, probe.double())
    tolerance = TOLERANCE[out.dtype]
    assert distance(out, expected) < tolerance
    for grad, expected_grad, leaf in zip(grads, expected_grads, leaves):
        assert grad.dtype == leaf.dtype and distance(grad, expected_grad) < tolerance


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('size', [3, pytest.param(5, marks=pytest.mark.slow)])
def test_depthwise(size, dtype):
    weight, bias = torch.randn(20, 1, size, size, device=DEVICE).to(dtype), torch.randn(20, device=DEVICE).to(dtype)
    x = image(2, 20, 5, 11, dtype, of_slice=size == 5)
    assert_follows(kernels.depthwise_conv2d, depthwise_conv2d_reference, [x, weight, bias])


@pytest.mark.parametrize('of_gelu', [False, True])
def test_with_its_input_added(of_gelu):
    weight, bias = torch.randn(70, 1, 3, 3, device=DEVICE), torch.randn(70, device=DEVICE)

    def both(function):
        return lambda *tensors: function(*tensors, of_gelu)

    tensors = [image(1, 70, 9, 2), weight, bias]
    assert_follows(both(kernels.residual_depthwise_conv2d), both(residual), tensors)


@pytest.mark.parametrize(
    'batch, height, width', [(3, 6, 7), (1, 1, 1), pytest.param(1, 23, 24, marks=pytest.mark.slow)]
)
def test_kernels_of_each_image(batch, height, width):
    tensors = [image(batch, 8, height, width), torch.randn(batch, 8, 3, 3, device=DEVICE)]
    assert_follows(kernels.dynamic_depthwise_conv2d, sum_of_shifts, tensors)


def test_other_sizes_stay_with_pytorch():
    tensors = [image(1, 4, 9, 9), torch.randn(4, 1, 7, 7, device=DEVICE), torch.randn(4, device=DEVICE)]
    assert_follows(kernels.depthwise_conv2d, depthwise_conv2d_reference, tensors, same_kernel=False)


def test_autocast():
    x, weight, bias = image(1, 8, 6, 6), torch.randn(8, 1, 3, 3, device=DEVICE), torch.randn(8, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kernels.depthwise_conv2d(x, weight, bias).dtype == torch.bfloat16
        added = kernels.residual_depthwise_conv2d(x, weight, bias)
    assert added.dtype == torch.float32
    assert distance(added, residual(x, weight, bias)) < 2e-2


@pytest.mark.slow
def test_registration():
    weight = torch.randn(1, 8, 3, 3, device=DEVICE).requires_grad_()
    x, bias = image(2, 8, 4, 5).requires_grad_(), torch.randn(8, device=DEVICE).requires_grad_()
    for options in ((False, False), (True, True)):
        torch.library.opcheck(op, (x, weight, bias, *options))
        args = (torch.randn_like(x), x.detach(), weight.detach(), *options)
        torch.library.opcheck(op_backward, args, test_utils=('test_schema', 'test_faketensor'))


def test_second_derivatives():
    x, weight, bias = image(2, 4, 4, 5), torch.randn(4, 1, 3, 3, device=DEVICE), torch.randn(4, device=DEVICE)
    results = []
    for convolve in (kernels.depthwise_conv2d, depthwise_conv2d_reference):
        leaf = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(convolve(leaf, weight, bias).square().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
    assert distance(*results) < 1e-4
