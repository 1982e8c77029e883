# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Slices of one projection: their gradients become that of the whole without a copy, and never a wrong one."""

import pytest
import torch

from mmlinattn import ops
from mmlinattn.ops.tensors import gradients_like, split

pytestmark = pytest.mark.usefixtures('fast_forms')


class Fill(torch.autograd.Function):
    """Gradients 1, 2, ... in memory made for them."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*parts)
        return sum(part.sum() for part in parts)

    @staticmethod
    def backward(ctx, grad):
        grads = gradients_like(*ctx.saved_tensors)
        for value, part in enumerate(grads, 1):
            part.fill_(value)
        return tuple(grads)


@pytest.mark.parametrize('shape', [(2, 3, 7), (1, 1, 7), (4, 7)], ids=str)
def test_gradients_of_slices_become_one_without_a_copy(shape):
    x = torch.randn(shape, requires_grad=True)
    hidden = x * 1
    seen = []
    hidden.register_hook(seen.append)
    parts = split(hidden, (2, 4, 1))
    parts[0].register_hook(seen.append)
    Fill.apply(*parts).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 1, 2, 2, 2, 2, 3]).expand(shape))
    part, whole = seen
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize('used', [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_gradients_of_slices_made_by_anybody(used):
    """Unused slices, and gradients of other memory."""
    x = torch.randn(2, 5, 9, dtype=torch.float64, requires_grad=True)
    grads = []
    for parts in (split(x * 1, (3, 3, 3)), (x * 1).split((3, 3, 3), dim=-1)):
        grads.append(torch.autograd.grad(sum((parts[i] ** (i + 2)).sum() for i in used), x))
    torch.testing.assert_close(*grads)


def test_gradients_in_another_order():
    x = torch.randn(2, 5, 9, requires_grad=True)
    q, k, v = split(x * 1, (3, 3, 3))
    Fill.apply(v, q, k).backward()
    torch.testing.assert_close(x.grad, torch.tensor([2.0, 3, 1]).repeat_interleave(3).expand(2, 5, 9))


def test_gradients_of_gradients_that_lie_as_the_slices():
    """Of x cubed, put together again: six times x, in all slices."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    whole = torch.cat(split(x * 1, (2, 3)), dim=-1)
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


@pytest.mark.parametrize('moved', range(3))
def test_gradients_of_which_one_lies_elsewhere_are_copied(moved):
    """All but one are slices of one memory, which looks like the whole from its first slice."""

    class Scattered(Fill):
        @staticmethod
        def backward(ctx, grad):
            grads = list(Fill.backward(ctx, grad))
            whole = grads[moved].clone()
            grads[moved].fill_(99)
            grads[moved] = whole
            return tuple(grads)

    x = torch.randn(2, 5, 9, requires_grad=True)
    Scattered.apply(*split(x * 1, (3, 3, 3))).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 2, 3]).repeat_interleave(3).expand(2, 5, 9))


def test_keys_that_somebody_keeps_are_not_written_over():
    """With gradients on, also those that ask for none."""
    q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
    kept, scale = k.clone(), torch.ones(8, requires_grad=True)
    ops.focused_attention(q, k, v, 2, scale, 3, offset=torch.ones(1, 6, 8))
    assert torch.equal(k, kept)


def test_gradients_of_tensors_that_are_no_slices():
    """In the order of the tensors, each in memory that may be written."""
    x, other = torch.randn(2, 3, 8), torch.randn(3)
    (first, second), expanded = x.split((3, 5), dim=-1), torch.randn(2, 1, 3).expand(2, 4, 3)
    cases = (x[..., :5], x[..., 2:]), (expanded, x, other), (first, other, second), (other, second, first)
    for given in cases:
        made = gradients_like(*given)
        assert [grad.shape for grad in made] == [tensor.shape for tensor in given]
        for value, grad in enumerate(made):
            grad.fill_(value)
        assert [grad.unique().tolist() for grad in made] == [[value] for value in range(len(made))]
        assert not any(0 in grad.stride() for grad in made)  # expanded memory would be written over
