# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The linear attentions that the papers compare with, against their equations with N x N maps."""

import math

import pytest
import reference
import torch
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import (
    AngularMixer,
    Attention,
    EfficientMixer,
    EnhancedMixer,
    Grid,
    HydraMixer,
    StripeAttention,
    WindowAttention,
)

DIM, HEADS = 16, 2
SEQUENCE = dict(conv='sequence')


def heads_of(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def unit(x):
    return x / x.square().sum(dim=-1, keepdim=True).sqrt()


def real_ones(mask, like):
    return torch.ones_like(like[..., 0]) if mask is None else mask.to(like.dtype)


def hydra(mixer, q, k, v, grid, mask):
    weights = torch.einsum('bic,bjc->bcij', unit(q), unit(k))  # a map for every channel
    return torch.einsum('bcij,bjc->bic', weights * real_ones(mask, k)[:, None, None], v)


def efficient(mixer, q, k, v, grid, mask):
    queries, keys = heads_of(q).exp(), heads_of(k).exp() * real_ones(mask, k)[:, None, :, None]
    queries = queries / queries.sum(dim=-1, keepdim=True)
    keys = keys / keys.sum(dim=-2, keepdim=True)
    return merged(reference.similarity(queries, keys) @ heads_of(v))


def enhanced(mixer, q, k, v, grid, mask):
    queries, keys = (heads_of(t.clamp(min=0)) for t in (q, k))
    score = reference.similarity(queries, keys) * real_ones(mask, k)[:, None, None]
    count = real_ones(mask, k).sum(dim=1)[:, None, None, None]
    return merged(score @ heads_of(v) / count / (score.sum(dim=-1, keepdim=True) / count + 1e-6))


def angular(mixer, q, k, v, grid, mask):
    cosine = reference.similarity(unit(heads_of(q)), unit(heads_of(k))) / math.pi
    cosine = cosine * real_ones(mask, k)[:, None, None]
    if mixer.form == 'released':
        out = merged(unit((cosine + torch.eye(q.shape[1], dtype=q.dtype) / 2) @ heads_of(v)))
    else:
        weights = cosine + real_ones(mask, k)[:, None, None] / 2
        out = merged(weights / weights.sum(dim=-1, keepdim=True) @ heads_of(v))
    if mixer.conv is None:
        return out
    kernels = mixer.dconv.weight.repeat_interleave(mixer.head_dim, dim=0)
    if mixer.conv == 'grid':
        local = reference.local_term(v[:, grid.prefix :], kernels, 0, grid.height, grid.width)
        return torch.cat((out[:, : grid.prefix], out[:, grid.prefix :] + local), dim=1)
    padded = torch.cat((v.new_zeros(len(v), 4, DIM), v, v.new_zeros(len(v), 4, DIM)), dim=1)
    return out + sum(padded[:, tap : tap + v.shape[1]] * kernels[:, 0, tap, 0] for tap in range(9))


CASES = {
    'hydra': (HydraMixer, {}, hydra),
    'efficient': (EfficientMixer, {}, efficient),
    'enhanced': (EnhancedMixer, {}, enhanced),
    'angular': (AngularMixer, {}, angular),
    'angular, sequence': (AngularMixer, SEQUENCE, angular),
    'angular, paper': (AngularMixer, dict(form='paper'), angular),
    'angular, paper, alone': (AngularMixer, dict(form='paper', conv=None), angular),
}
every_case = pytest.mark.parametrize(('mixer', 'options', 'twin'), CASES.values(), ids=CASES)


def build(mixer, options):
    mixer = mixer(DIM, HEADS, **options).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def tokens(count, batch=2):
    return [torch.randn(batch, count, DIM, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize('form', ['reference', 'auto'])
@pytest.mark.parametrize('grid', [Grid(3, 5), Grid(3, 4, prefix=1), Grid(1, 1), Grid(7, 1)], ids=str)
@every_case
def test_its_quadratic_twin(mixer, options, twin, grid, form):
    mixer = build(mixer, options)
    q, k, v = tokens(grid.num_tokens)
    with ops.use(form):
        fast, slow = mixer(q, k, v, grid, grid), twin(mixer, q, k, v, grid, None)
        if grid.num_tokens == 1:  # where some gradients vanish
            torch.testing.assert_close(fast, slow)
        else:
            reference.assert_twins(fast, slow, [q, k, v, *mixer.parameters()])
        alone = mixer(q[1:], k[1:], v[1:], grid, grid)
        torch.testing.assert_close(fast[1:], alone)


@every_case
def test_with_padding(mixer, options, twin):
    """Padded keys and queries hold anything; their outputs are nobody's."""
    mixer, grid = build(mixer, options), Grid(3, 5)
    if mixer.sequential:
        pytest.skip('not in windows')
    q, k, v = tokens(15)
    mask = torch.rand(2, 15) > 0.3
    real = mask.unsqueeze(-1).double()
    fast = mixer(q, k, v * real, grid, grid, mask=mask)[mask]
    slow = twin(mixer, q, k, v * real, grid, mask)[mask]
    reference.assert_twins(fast, slow, [q, k, v, *mixer.parameters()])
    other = mixer(q + 100 * (1 - real), k + 100 * (1 - real), v * real, grid, grid, mask=mask)[mask]
    torch.testing.assert_close(other, fast)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@every_case
def test_autocast_is_finite_and_close(mixer, options, twin, dtype):
    """Many tokens with a mean: sums over them leave the range of float16."""
    spec = dict(type=next(name for name, case in CASES.items() if case[0] is mixer), **options)
    attention = Attention(32, 2, spec)
    nn.init.constant_(attention.qkv.bias, 3)
    x, grid = torch.randn(1, 120 * 200, 32, requires_grad=True), Grid(120, 200)
    exact = attention(x, grid)
    with torch.autocast('cpu', dtype):
        out = attention(x, grid)
    assert out.isfinite().all()
    assert (out - exact).norm() < 16 * torch.finfo(dtype).eps * exact.norm()
    (out.float().square().mean() / out.detach().float().norm()).backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in attention.parameters())


@every_case
def test_cost_grows_with_the_tokens_only(mixer, options, twin):
    """4 x the tokens: the largest tensor grows 4-fold, not 16-fold."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.size = max(self.size, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    mixer, sizes = mixer(DIM, HEADS, **options), []
    for side in (16, 32):
        with Largest() as largest, torch.no_grad():
            mixer(*(torch.randn(1, side * side, DIM) for _ in range(3)), Grid(side, side), Grid(side, side))
        sizes.append(largest.size)
    assert sizes[1] <= 4 * sizes[0] + 32


def test_a_dead_token_is_finite():
    """Vectors without a direction: zero queries, keys and values."""
    for name in ('hydra', 'angular', 'efficient', 'enhanced'):
        attention = Attention(DIM, HEADS, name)
        nn.init.zeros_(attention.qkv.bias)
        x = torch.zeros(1, 12, DIM, requires_grad=True)
        out = attention(x, Grid(3, 4))
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad.abs().max() < 1e3 and all(p.grad.abs().max() < 1e3 for p in attention.parameters())


def test_what_angular_attention_refuses():
    with pytest.raises(ValueError, match="form='release' has to be 'released' or 'paper'"):
        AngularMixer(DIM, HEADS, form='release')
    with pytest.raises(ValueError, match=r"conv='9x1' has to be one of \('grid', 'sequence', None\)"):
        AngularMixer(DIM, HEADS, conv='9x1')
    q, k, v = tokens(6)
    with pytest.raises(ValueError, match=r'as many keys as queries \(6\), not 4; released=False takes any'):
        ops.angular_attention(q, k[:, :4], v[:, :4], HEADS)
    for arrangement in (WindowAttention, StripeAttention):
        with pytest.raises(ValueError, match='goes over the sequence of all tokens, which windows and stripes cut'):
            arrangement(DIM, HEADS, dict(type='angular', **SEQUENCE), (3, 3))
