# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Softmax attention of large maps on CPUs, in blocks of rows."""

import pytest
import torch

from mmlinattn.ops import linear, memory, softmax_attention
from mmlinattn.ops.linear import cpu as linear_cpu
from mmlinattn.ops.softmax_attention import cpu, reference

pytestmark = [
    pytest.mark.usefixtures('fast_forms'),
    pytest.mark.skipif(cpu.onednn.LINEAR is None, reason="this build of PyTorch lacks oneDNN's fused linear layer"),
]
SIZES = {'self': (37, 37, 8), 'keys': (50, 9, 8), 'wide values': (20, 31, 12), 'one key': (17, 1, 4)}
sizes = pytest.mark.parametrize('size', SIZES.values(), ids=SIZES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cpu, '_MIN_MACS', 1)
    monkeypatch.setattr(memory, 'BLOCK_NUMEL', 200)
    monkeypatch.setattr(cpu, '_ROWS', 4)


def heads(size, batch=2):
    """Queries, keys, values of three heads, as views in which those of a token lie side by side."""
    queries, keys, width = size
    widths = (queries, 8), (keys, 8), (keys, width)
    return [torch.randn(batch, tokens, 3, dim).transpose(1, 2).requires_grad_() for tokens, dim in widths]


@sizes
def test_values_and_gradients_are_those_of_the_equation(size, monkeypatch):
    leaves = heads(size)
    used = []
    rows = cpu._rows
    monkeypatch.setattr(cpu, '_rows', lambda *args: used.append(0) or rows(*args))
    out, expected = cpu.attend(*leaves, None), reference.equation(*leaves, None)
    torch.testing.assert_close(out, expected)
    with torch.no_grad():
        torch.testing.assert_close(cpu.attend(*leaves, None), expected)
    assert len(used) == 2
    probe = torch.randn_like(out)
    gradients = [torch.autograd.grad(result, leaves, probe) for result in (out, expected)]
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_each_query_has_its_own_largest_logit():
    """Three queries of one block whose logits are a hundred apart, of which the smaller still choose a key."""
    q = torch.tensor([[400.0, 0.0], [20.0, 0.0], [0.0, -3.0], [-300.0, 0.0]]).expand(1, 3, 4, 2).contiguous()
    k, v = torch.eye(2).repeat(2, 1)[:3].expand(1, 3, 3, 2).contiguous(), torch.randn(1, 3, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(cpu.attend(q, k, v, None), reference.equation(q, k, v, None))


def test_some_need_no_gradient():
    q, k, v = heads(SIZES['self'])
    cpu.attend(q.detach(), k, v.detach(), None).square().sum().backward()
    ours, k.grad = k.grad, None
    reference.equation(q.detach(), k, v.detach(), None).square().sum().backward()
    torch.testing.assert_close(ours, k.grad, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients():
    leaves = heads(SIZES['wide values'])
    found = []
    for attend in (cpu.attend, reference.equation):
        grads = torch.autograd.grad(attend(*leaves, None).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_of_slices_of_one_projection(monkeypatch):
    x, weight = torch.randn(2, 40, 24), torch.randn(72, 24).mul_(0.2).requires_grad_()
    found = []
    for min_macs in (1, 2**40):
        monkeypatch.setattr(cpu, '_MIN_MACS', min_macs)
        q, k, v = memory.split(x @ weight.T, [24] * 3)
        found.append(torch.autograd.grad(softmax_attention(q, k, v, 3).sin().sum(), weight)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_sharp_attention_has_no_denormal_weights():
    q, k, _ = heads(SIZES['self'])
    with torch.no_grad():
        weights = cpu._weights(*(tensor[0, 0] * 8 for tensor in (q, k)))
    assert weights.sum(dim=-1).allclose(torch.ones(37))
    assert 1e-16 < weights.min() < 1e-12


@pytest.mark.parametrize('what', ['empty', 'half', 'bias', 'small', 'long'])
def test_what_has_to_go_another_way(what, monkeypatch):
    q, k, v = heads(SIZES['self'], batch=0 if what == 'empty' else 2)
    bias = torch.randn(37, 37)[None, None] if what == 'bias' else None
    if what == 'half':
        q, k, v = (t.half() for t in (q, k, v))
    if what == 'small':
        monkeypatch.setattr(cpu, '_MIN_MACS', 2**20)
    if what == 'long':
        monkeypatch.setattr(cpu, '_MAX_KEYS', 36)
    monkeypatch.setattr(cpu, '_rows', None)
    out = cpu.attend(q, k, v, bias)
    torch.testing.assert_close(out, reference.equation(q, k, v, bias), rtol=1e-2, atol=1e-2)


def test_onednn_is_given_no_matrix_with_gaps(monkeypatch):
    """As second factor it takes a thousand times as long there: slices, and gradients that are one number expanded."""
    product, calls = cpu.onednn.LINEAR, []

    def watched(x, weight, *args):
        calls.append(weight.is_contiguous() or weight.T.is_contiguous())
        return product(x, weight, *args)

    monkeypatch.setattr(cpu.onednn, 'LINEAR', watched)
    monkeypatch.setattr(linear_cpu, '_MIN_TRAINED_MACS', 1)
    cpu.attend(*heads(SIZES['self']), None).sum().backward()
    for width in (8, 40):
        x, weight = torch.randn(5, 60)[:, 20:40].requires_grad_(), torch.randn(width, 20).requires_grad_()
        linear(x, weight).sum().backward()
        linear(x, weight[:, ::2].repeat(1, 2)[:, :20]).sum().backward()
        linear(x, torch.randn(20, width).T).sum().backward()
    assert len(calls) > 20 and all(calls)


@pytest.mark.parametrize('widths', [(20, 20), (20, 8), (8, 20)])
def test_gradients_of_trained_linear_layers(widths, monkeypatch):
    """As the equations have them: whichever factor is the wider, or neither."""
    monkeypatch.setattr(linear_cpu, '_MIN_TRAINED_MACS', 1)
    x, weight, bias = torch.randn(3, 5, widths[0]), torch.randn(widths[::-1]), torch.randn(widths[1])
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    grad = torch.randn(3, 5, widths[1])
    out = linear(*inputs)
    found = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(out, torch.einsum('bmi,oi->bmo', x, weight) + bias)
    torch.testing.assert_close(found[0], torch.einsum('bmo,oi->bmi', grad, weight))
    torch.testing.assert_close(found[1], torch.einsum('bmo,bmi->oi', grad, x))
    torch.testing.assert_close(found[2], grad.sum(dim=(0, 1)))
