# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Numerical ranges and costs of every attention. Long sums in half precision: tests/ops."""

import copy
import itertools

import pytest
import torch
from helpers.references import ATTENTIONS, DIM, HEAD_DIM, HEADS, assert_same, attend, build, filled, tokens
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import Attention, Grid, StageContext, WindowAttention
from mmlinattn.attention.base import mean_token
from mmlinattn.layers import rotary_table
from mmlinattn.ops import dispatch, hallucinated

both_backends = pytest.mark.parametrize('backend', ['auto', 'reference'])
HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize('dtype', [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize('dead', [True, False], ids=['dead', 'apart'])
@pytest.mark.parametrize('name', ATTENTIONS)
def test_tokens_without_a_direction_and_queries_that_meet_no_key(name, dead, dtype):
    """Expect that quotients by eps do not turn scaled zero gradients into NaN."""
    attention = Attention(DIM, HEADS, ATTENTIONS[name])
    query_dim, key_dim, _ = attention.mixer.widths
    nn.init.zeros_(attention.qkv.bias)
    if not dead:
        attention.qkv.bias.data[:query_dim] = 3
        attention.qkv.bias.data[query_dim : query_dim + key_dim] = -3
    x = (torch.zeros if dead else torch.randn)(1, 12, DIM).requires_grad_()
    with torch.autocast('cpu', dtype, enabled=dtype.itemsize < 4):
        out = attention(x, StageContext(Grid(3, 4)))
    (64 * out.float().sum()).backward()
    grads = [leaf.grad for leaf in (x, *attention.parameters())]
    assert all(t.isfinite().all() for t in (out, *grads))
    assert not dead or dtype.itemsize < 4 or all(grad.abs().max() < 64e3 for grad in grads)


@pytest.mark.parametrize('dtype', [torch.float64, *HALF], ids=str)
def test_the_mean_token_is_that_of_valid_tokens(dtype):
    """Average beyond the range of half precision; the mean of padding alone is zero."""
    x = (torch.rand(3, 600, 4) * 100 + 60000).to(dtype)
    mask = torch.tensor([[True, True, False, True, False, False], [False] * 6, [True] * 6]).repeat(1, 100)
    x, wide = x * mask[..., None], x.double()
    found = mean_token(x, mask)
    assert found.dtype == mean_token(x, None).dtype == dtype
    expected = torch.stack((wide[0, mask[0]].mean(0), torch.zeros(4, dtype=torch.double), wide[2].mean(0)))
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0)
    torch.testing.assert_close(mean_token(x, None).double(), x.double().mean(1), rtol=0.01, atol=0)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            self.size = max(self.size, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize('learns', [False, True])
@both_backends
@pytest.mark.parametrize('name', [name for name in ATTENTIONS if name != 'softmax'])
def test_no_map_of_all_pairs_is_built(name, backend, learns, monkeypatch):
    """Expect memory to grow 4-fold, not 16-fold, for 4 times as many tokens."""
    # a block of rows of softmax attention is of one size for both; whoever watches sees the reference otherwise
    monkeypatch.setattr(hallucinated, '_BLOCK_NUMEL', 1024)
    monkeypatch.setattr(dispatch, 'needs_reference', lambda *_: backend == 'reference')
    attention, sizes = Attention(DIM, HEADS, ATTENTIONS[name], local_kernel=5), []
    for side in (24, 48):
        x = torch.randn(1, side * side, DIM, requires_grad=learns)
        with Largest() as largest, torch.set_grad_enabled(learns):
            out = attention(x, StageContext(Grid(side, side), rotary_table(side, side, HEAD_DIM)))
            if learns:
                out.sum().backward()
        sizes.append(largest.size)
    assert sizes[1] <= 4 * sizes[0] + 32


def wrapped(attention):
    """Copy an attention with IHH and CHH as modules of another class, called on the maps."""
    attention = copy.deepcopy(attention)
    for name in ('ihh', 'chh'):
        if getattr(attention.mixer, name) is not None:
            setattr(attention.mixer, name, nn.Sequential(getattr(attention.mixer, name)))
    return attention


@both_backends
@pytest.mark.parametrize('name', [name for name in ATTENTIONS if name.startswith('hallucinated')])
def test_hallucination_by_modules_on_maps(name, backend):
    """Compare with modules called on the maps, with class tokens, mask and bias, and in shifted windows."""
    windows = filled(WindowAttention(DIM, HEADS, ATTENTIONS[name], (4, 4), shift=True, relative_bias=True))
    attention, image = build(name), tokens(2, 64).unflatten(1, (8, 8))
    with ops.use(backend):
        assert_same(wrapped(windows)(image, StageContext.of(image)), windows(image, StageContext.of(image)), [image])
        for prefix, is_masked in itertools.product((0, 1), (False, True)):
            x, bias = tokens(2, 20 + prefix), torch.randn(1, 2 * HEADS, *2 * [20 + prefix], dtype=torch.float64)
            options = dict(mask=torch.rand(2, 20 + prefix) > 0.3 if is_masked else None, bias=bias)
            ours, plain = (attend(each, x, Grid(4, 5, prefix), **options) for each in (wrapped(attention), attention))
            assert_same(ours, plain, [x])


@both_backends
def test_hallucination_by_circular_convolutions(backend):
    attention, x = build('hallucinated ihh-chh'), tokens(2, 20)
    conv = attention.mixer.ihh
    conv.padding_mode, conv._reversed_padding_repeated_twice = 'circular', [1] * 4
    with ops.use(backend):
        assert_same(*(attend(each, x, Grid(4, 5)) for each in (wrapped(attention), attention)), [x])


@pytest.mark.parametrize('prefix', [0, 1])
@pytest.mark.parametrize('steps', [('ihh', 'chh'), ('chh',)], ids='-'.join)
def test_blocks_of_hallucinated_attention(monkeypatch, steps, prefix):
    """Vary the block of queries from one to those of several images, with mask and biases of every shape."""
    name = 'hallucinated ' + '-'.join(steps)
    attention, grid = build(name), Grid(4, 5, prefix)
    n = grid.num_tokens
    monkeypatch.setattr(hallucinated, '_MIN_ROWS', 3)
    x, full = tokens(3, n, False), torch.randn(3, 2 * HEADS, n, n, dtype=torch.float64)
    mask = torch.rand(3, n) > 0.3
    for budget, bias, real in itertools.product(
        (1, 400, 3000, 10**6), (None, full, full[:1], full[:, :1], full[:, :, :1]), (None, mask)
    ):
        monkeypatch.setattr(hallucinated, '_BLOCK_NUMEL', budget)
        with ops.use('reference'):
            expected = attend(attention, x, grid, bias=bias, mask=real)
        with torch.no_grad():
            torch.testing.assert_close(attend(attention, x, grid, bias=bias, mask=real), expected)
