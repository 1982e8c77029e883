# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Injective linear attention against its N x N map, values and gradients."""

import pytest
import reference
import torch
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import Attention, Grid, InLineMixer

DIM, HEADS, HEIGHT, WIDTH = 16, 2, 3, 5
HEAD_DIM = DIM // HEADS
GRID = Grid(HEIGHT, WIDTH)
SCALE = HEAD_DIM**-0.5
KERNELS = ['identity', 'relu', 'leakyrelu', 'exp']


def inline_attention(q, k, v, scale, mask=None):
    return reference.call_by_head(ops.inline_attention, q, k, v, scale, mask=mask)


def linear_attention(q, k, v, mask=None, eps=1e-6):
    return reference.call_by_head(ops.linear_attention, q, k, v, mask=mask, eps=eps)


def build(**options):
    attention = Attention(DIM, HEADS, dict(type='inline', **options)).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def image_tokens(num=GRID.num_tokens, batch=2):
    return torch.randn(batch, num, DIM, dtype=torch.float64, requires_grad=True)


def literal(attention, x, kernel='identity', injective=True, residual=True, source=None, prefix=0, size=None):
    """``W_o (A v + DWConv_{mean(x)}(v))``, item by item where the kernels differ."""
    q, k, v = (
        x @ weight.T + bias for weight, bias in zip(attention.qkv.weight.split(DIM), attention.qkv.bias.split(DIM))
    )
    q, k, values = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
    q, k = reference.inline_kernel(q, kernel), reference.inline_kernel(k, kernel)
    attention_map = reference.inline_map(q, k, SCALE) if injective else reference.linear_map(q, k)
    out = (attention_map @ values).transpose(1, 2).flatten(2)
    if residual:
        layers = attention.mixer.residual
        mean = (x if source is None else source).mean(dim=1)
        kernels = reference.predicted_kernels(mean, layers.fc1, layers.fc2, HEADS)
        zero = torch.zeros(DIM, dtype=x.dtype)
        patches = v[:, prefix:]
        local = [
            reference.local_term(patches[i : i + 1], kernels[i], zero, *(size or (HEIGHT, WIDTH)))
            for i in range(len(x))
        ]
        out = torch.cat((out[:, :prefix], out[:, prefix:] + torch.cat(local)), dim=1)
    return out @ attention.proj.weight.T + attention.proj.bias


@pytest.mark.parametrize('residual', [False, True], ids=['', 'residual'])
@pytest.mark.parametrize('injective', [False, True], ids=['division', 'injective'])
@pytest.mark.parametrize('kernel', KERNELS)
def test_every_form_equals_its_quadratic_twin(kernel, injective, residual):
    if not injective and kernel in ('identity', 'leakyrelu'):
        pytest.skip('a division by sums of either sign says nothing about rounding')
    attention = build(kernel=kernel, injective=injective, local_residual=residual)
    x = image_tokens()
    fast = attention(x, GRID)
    reference.assert_twins(fast, literal(attention, x, kernel, injective, residual), [x, attention.qkv.weight])


def test_the_local_residual_is_predicted_with_gradients():
    attention, x = build(), image_tokens()
    residual = attention.mixer.residual
    leaves = [x, *residual.parameters()]
    reference.assert_twins(attention(x, GRID), literal(attention, x), leaves)


def test_weights_of_a_row_sum_to_one_without_a_division():
    """Constant values come back to the last bits, whatever the signs of queries and keys."""
    q, k = (torch.randn(2, HEADS, 30, 8, dtype=torch.float64) for _ in range(2))
    ones = torch.ones(2, HEADS, 30, 3, dtype=torch.float64)
    torch.testing.assert_close(inline_attention(q, k, ones, 0.3), ones, rtol=0, atol=1e-13)
    rows = reference.inline_map(q, k, 0.3).sum(dim=-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-13)


def test_it_is_injective_where_linear_attention_is_not():
    """Queries of one direction and different lengths (InLine Fig. 1, Prop. 1 and 2)."""
    k, v = torch.rand(1, 1, 30, 8, dtype=torch.float64), torch.randn(1, 1, 30, 8, dtype=torch.float64)
    direction = torch.rand(1, 1, 1, 8, dtype=torch.float64)
    q = direction * torch.tensor([1.0, 2.0], dtype=torch.float64).view(1, 1, 2, 1)
    confused = linear_attention(q, k, v, eps=0.0)
    torch.testing.assert_close(confused[:, :, 0], confused[:, :, 1])
    apart = inline_attention(q, k, v, 1.0)
    assert (apart[:, :, 0] - apart[:, :, 1]).abs().max() > 1e-3


@pytest.mark.parametrize('injective', [False, True], ids=['division', 'injective'])
def test_masked_tokens_count_neither_in_sums_nor_means_nor_n(injective):
    q, k = (torch.rand(2, HEADS, 15, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.randn(2, HEADS, 15, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 15) > 0.4
    values = v * mask[:, None, :, None]
    if injective:
        out = inline_attention(q, k, values, SCALE, mask)
    else:
        out = linear_attention(q, k, values, mask)
    for item in range(2):
        part = [t[item : item + 1, :, mask[item]] for t in (q, k, v)]
        attention_map = reference.inline_map(*part[:2], SCALE) if injective else reference.linear_map(*part[:2])
        reference.assert_twins(out[item : item + 1, :, mask[item]], attention_map @ part[2], (q, k, v))


def test_a_class_token_mixes_with_the_others_and_has_no_neighbours():
    """DeiT: the kernels come from the mean of all tokens, the class token's included."""
    attention = build()
    x = image_tokens(GRID.num_tokens + 1)
    fast = attention(x, Grid(HEIGHT, WIDTH, prefix=1))
    reference.assert_twins(fast, literal(attention, x, prefix=1), [x])


def test_the_kernels_may_come_from_other_tokens():
    """CSWin: from the block's input before its norm."""
    attention, x, source = build(), image_tokens(), image_tokens()
    reference.assert_twins(attention(x, GRID, context_tokens=source), literal(attention, x, source=source), [x, source])


def test_the_kernels_come_from_the_queries_tokens_where_keys_are_reduced():
    attention, x, kv = build(), image_tokens(), image_tokens()
    for source in (x, kv):
        grid = dict(kv=kv, key_grid=GRID)
        given = attention(x, GRID, context_tokens=source, **grid)
        assert torch.allclose(attention(x, GRID, **grid), given, rtol=1e-4, atol=1e-5) is (source is x)


@pytest.mark.parametrize('size', [(1, 15), (15, 1), (1, 1), (2, 2)], ids=str)
def test_maps_narrower_than_the_kernel(size):
    attention, x = build(), image_tokens(size[0] * size[1])
    slow = literal(attention, x, size=size)
    torch.testing.assert_close(attention(x, Grid(*size)), slow)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('injective', [False, True], ids=['division', 'injective'])
def test_half_precision_on_a_detection_map(dtype, injective):
    """Stage 1 at 1333x800: N = 66,800 exceeds float16, 1/N is below its normal numbers."""
    q, k, v = (torch.randn(1, 1, 200 * 334, 16) for _ in range(3))
    if not injective:
        q, k = q.abs(), k.abs()
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
    call = (lambda *t: inline_attention(*t, 0.25)) if injective else linear_attention
    out = call(q, k, v)
    assert out.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = call(*wide)
    resolution = torch.finfo(dtype).eps
    assert (out - exact).abs().max() < 16 * resolution * v.abs().mean()
    probe = torch.randn_like(exact)
    ours = torch.autograd.grad((out.double() * probe).sum(), (q, k, v))
    theirs = torch.autograd.grad((exact * probe).sum(), wide)
    for mine, other in zip(ours, theirs):
        assert mine.isfinite().all()
        assert (mine - other).norm() < 16 * resolution * other.norm()


def test_keys_with_a_large_common_offset():
    """Only deviations from the mean key matter; float32 keeps them beside an offset of 100."""
    q, k, v = (torch.randn(1, 1, 500, 8) for _ in range(3))
    exact = inline_attention(q.double(), k.double(), v.double(), 0.3)
    out = inline_attention(q, k + 100, v, 0.3)
    assert (out - exact).abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.parametrize('kernel', ['elu', '', None])
def test_unknown_kernel(kernel):
    with pytest.raises(ValueError) as error:
        InLineMixer(DIM, HEADS, kernel=kernel)
    assert str(error.value) == f"kernel={kernel!r} has to be one of ['identity', 'relu', 'leakyrelu', 'exp']"
