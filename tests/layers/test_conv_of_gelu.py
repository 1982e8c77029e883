# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
import torch.nn.functional as F

from mmlinattn.ops import conv_of_gelu


def plain(x, weight, bias, stride, groups, residual):
    hidden = F.gelu(x)
    out = F.conv2d(hidden, weight, bias, stride, weight.shape[-1] // 2, 1, groups)
    return hidden + out if residual else out


def tensors(groups, dtype=torch.float64):
    x = torch.randn(2, 4, 7, 6, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 4 // groups, 3, 3, dtype=dtype)
    return [t.requires_grad_() for t in (x, weight, torch.randn(4, dtype=dtype))]


CASES = [(1, 1, False), (2, 1, False), (1, 4, False), (1, 4, True)]


@pytest.mark.parametrize(('stride', 'groups', 'residual'), CASES)
@pytest.mark.parametrize('frozen', [(), (0,), (1,), (2,), (1, 2)], ids=str)
def test_values_and_gradients_are_those_of_the_plain_form(stride, groups, residual, frozen):
    leaves = tensors(groups)
    for i in frozen:
        leaves[i].requires_grad_(False)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    ours, expected = (f(*leaves, stride, groups, residual) for f in (conv_of_gelu, plain))
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(out, wanted, probe) for out in (ours, expected))):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(('size', 'batch'), [(1, 2), (5, 2), (3, 0)])
@pytest.mark.parametrize('biased', [False, True])
def test_kernels_of_other_sizes(size, batch, biased):
    """With a bias and without; the padding keeps the size of the map. Also of no images."""
    x, weight, bias = torch.randn(batch, 4, 7, 6), torch.randn(4, 1, size, size), torch.randn(4) if biased else None
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    arguments = (*leaves, None)[:3]
    ours, expected = (f(*arguments, 1, 4, True) for f in (conv_of_gelu, plain))
    assert ours.shape == x.shape
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    for mine, other in zip(*(torch.autograd.grad(out, leaves, probe) for out in (ours, expected))):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_in_the_type_it_would_have(dtype):
    """Weights in float32 as always; maps in half, or still in float32."""
    x, weight, bias = tensors(4, torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16):
        out, expected = (f(x, weight, bias, 1, 4, False) for f in (conv_of_gelu, plain))
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(t.float().sum(), (x, weight)) for t in (out, expected))
    for mine, other in zip(ours, theirs):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures('fast_forms')
def test_only_the_input_is_kept():
    kept = set()
    leaves = tensors(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()), lambda _: None):
        conv_of_gelu(*leaves)
    assert kept == {leaf.data_ptr() for leaf in leaves}  # the bias for second derivatives
