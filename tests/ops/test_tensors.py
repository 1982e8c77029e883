# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Slices of one projection: their gradients become that of the whole without a copy, and never a wrong one."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

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


@settings(deadline=None, derandomize=True, database=None)
@example([2, 0, 1], set())
@example([0, 1, 2], {1})  # what is left looks like the whole, from its first slice
@given(st.lists(st.integers(0, 2), min_size=1, unique=True), st.sets(st.integers(0, 2)))
def test_gradients_of_slices_wherever_they_lie(order, moved):
    """Of slices in any order, some of which nobody used; some gradients lie in memory of their own."""

    class Scattered(Fill):
        @staticmethod
        def backward(ctx, grad):
            grads = list(Fill.backward(ctx, grad))
            for i in moved.intersection(range(len(grads))):
                alone = torch.empty_like(x).as_strided_(grads[i].shape, grads[i].stride()).copy_(grads[i])
                grads[i].fill_(99)
                grads[i] = alone
            return tuple(grads)

    x, widths = torch.randn(2, 5, 9, requires_grad=True), torch.tensor([3, 4, 2])
    parts = split(x * 1, widths.tolist())
    Scattered.apply(*(parts[i] for i in order)).backward()
    values = torch.tensor([1.0 + order.index(i) if i in order else 0.0 for i in range(3)])
    torch.testing.assert_close(x.grad, values.repeat_interleave(widths).expand(2, 5, 9))


def test_gradients_of_gradients_that_lie_as_the_slices():
    """Of x cubed, put together again: six times x, in all slices."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    whole = torch.cat(split(x * 1, (2, 3)), dim=-1)
    (first,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def test_gradients_of_tensors_that_are_no_slices():
    """In the order of the tensors, each in memory that may be written."""
    x, other = torch.randn(2, 3, 8), torch.randn(3)
    (first, second), expanded = x.split((3, 5), dim=-1), torch.randn(2, 1, 3).expand(2, 4, 3)
    cases = (
        (x[..., :5], x[..., 2:]),
        (expanded, x, other),
        (first, other, second),
        (other, second, first),
        (first, other, first),
    )
    for tensors in cases:
        made = gradients_like(*tensors)
        assert [grad.shape for grad in made] == [tensor.shape for tensor in tensors]
        for value, grad in enumerate(made):
            grad.fill_(value)
        assert [grad.unique().tolist() for grad in made] == [[value] for value in range(len(made))]
        assert not any(0 in grad.stride() for grad in made)  # expanded memory would be written over
