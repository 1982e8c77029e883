# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Hallucinated attention against the maps of the paper, built literally."""

import pytest
import reference
import torch
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import Attention, Grid, HallucinatedMixer, WindowAttention
from mmlinattn.ops import dispatch, hallucinated

DIM, HEADS = 24, 3  # of the host: six heads of width 4, three of them real
STEPS = [('ihh', 'chh'), ('chh', 'ihh'), ('ihh',), ('chh',), ()]
every_order = pytest.mark.parametrize('steps', STEPS, ids='-'.join)
both_forms = pytest.mark.parametrize('form', ['reference', 'auto'])


def build(steps=STEPS[0], dim=DIM, heads=HEADS):
    mixer = HallucinatedMixer(dim, heads, steps=steps).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def tokens(queries, keys, batch=2, dim=DIM):
    sizes = ((queries, dim // 2), (keys, dim // 2), (keys, dim))
    return [torch.randn(batch, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


def literal(mixer, q, k, v, grid, mask=None, bias=None, regions=None):
    half = mixer.num_heads // 2
    queries, keys = (t.unflatten(-1, (half, -1)).transpose(1, 2) for t in (q, k))
    values = v.unflatten(-1, (2 * half, -1)).transpose(1, 2)
    real = reference.similarity(queries, keys) * mixer.head_dim**-0.5
    convs = dict(ihh=mixer.ihh, chh=mixer.chh)
    steps = [(name, (convs[name].weight, convs[name].bias)) for name in mixer.steps]
    derived = reference.hallucinated_maps(real, steps, grid[:2], grid.prefix, mask, regions)
    logits = torch.cat((real, derived), dim=1)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], float('-inf'))
    return (logits.softmax(dim=-1) @ values).transpose(1, 2).flatten(2)


def leaves_of(mixer, *inputs):
    """Those whose gradient is not zero: biases shift all logits of a query alike."""
    return [*inputs, *(p for name, p in mixer.named_parameters() if name.endswith('weight'))]


@both_forms
@every_order
@pytest.mark.parametrize('prefix', [0, 1])
def test_its_literal_twin(steps, prefix, form):
    mixer, grid = build(steps), Grid(3, 4, prefix)
    q, k, v = tokens(grid.num_tokens, grid.num_tokens)
    with ops.use(form):
        fast = mixer(q, k, v, grid, grid)
        reference.assert_twins(fast, literal(mixer, q, k, v, grid), leaves_of(mixer, q, k, v))


@both_forms
@every_order
def test_reduced_keys_mask_and_bias(steps, form):
    """Other keys than queries, a row and a column of them padding, whatever it holds."""
    mixer, grid, key_grid = build(steps), Grid(4, 5), Grid(3, 4)
    q, k, v = tokens(20, 12)
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[:, 2] = mask[0, :, 3] = False
    mask = mask.flatten(1)
    bias = torch.randn(1, 6, 20, 12, dtype=torch.float64, requires_grad=True)
    real = mask.unsqueeze(-1).double()
    with ops.use(form):
        fast = mixer(q, k, v * real, grid, key_grid, mask=mask, bias=bias)
        slow = literal(mixer, q, k, v, key_grid, mask, bias)
        reference.assert_twins(fast, slow, [*leaves_of(mixer, q, k, v), bias])
        other = mixer(q, k + 100 * (1 - real), v * real, grid, key_grid, mask=mask, bias=bias)
    torch.testing.assert_close(other, fast)


@pytest.mark.parametrize('prefix', [0, 1])
@pytest.mark.parametrize('steps', [('ihh', 'chh'), ('chh',)], ids='-'.join)
def test_blocks_of_inference(monkeypatch, steps, prefix):
    """One query a block, several, the queries of several images; mask, and biases of few and of all images."""
    mixer, grid = build(steps), Grid(4, 5, prefix)
    n = grid.num_tokens
    monkeypatch.setattr(hallucinated, '_MIN_ROWS', 3)
    q, k, v = tokens(n, n, batch=3)
    mask = torch.rand(3, n) > 0.3
    full = torch.randn(3, 6, n, n, dtype=torch.float64)
    for budget in (1, 400, 3000, 10**6):
        monkeypatch.setattr(hallucinated, '_BLOCK_NUMEL', budget)
        for bias in (None, full, full[:1], full[:, :1], full[:, :, :1]):
            for real in (None, mask):
                values = v if real is None else v * real.unsqueeze(-1)
                expected = literal(mixer, q, k, values, grid, real, bias)
                with torch.no_grad():
                    torch.testing.assert_close(mixer(q, k, values, grid, grid, mask=real, bias=bias), expected)


@pytest.mark.parametrize('height, width', [(7, 9), (8, 8)])
def test_windows_of_a_rolled_map_have_no_neighbours_from_its_other_side(height, width):
    """Four regions in the last window, two in others: neither attention nor IHH crosses their borders. Where windows
    pad, the padding lies between the two sides; where they do not, only the regions keep the 3x3 of IHH apart."""
    attention = WindowAttention(DIM, HEADS, 'hallucinated', (4, 4), shift=True, relative_bias=True).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, height, width, DIM, dtype=torch.float64)
    out = attention(x)
    # each part of the rolled map alone, cut as the shift of 2 cuts it
    rows, columns = ((0, 2), (2, 6), (6, height)), ((0, 2), (2, 6), (6, width))
    for top, bottom in rows:
        for left, right in columns:
            part = x[:, top:bottom, left:right].flatten(1, 2)
            grid = Grid(bottom - top, right - left)
            bias = attention.relative_bias(*grid[:2])[None]
            alone = super(WindowAttention, attention).forward(part, grid, bias=bias).unflatten(1, grid[:2])
            torch.testing.assert_close(out[:, top:bottom, left:right], alone)


def test_biases_have_a_gradient_and_it_is_zero():
    mixer, grid = build(), Grid(3, 4)
    mixer(*tokens(12, 12), grid, grid).square().sum().backward()
    for conv in (mixer.ihh, mixer.chh):
        assert conv.weight.grad.any()
        assert not conv.bias.grad.any()


@both_forms
def test_one_token_and_items_alone(form):
    mixer = build()
    with ops.use(form):
        for grid in (Grid(1, 1), Grid(1, 7), Grid(7, 1, prefix=1)):
            q, k, v = tokens(grid.num_tokens, grid.num_tokens)
            together = mixer(q, k, v, grid, grid)
            torch.testing.assert_close(together, literal(mixer, q, k, v, grid))
            torch.testing.assert_close(together[1:], mixer(q[1:], k[1:], v[1:], grid, grid))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_autocast_is_finite_and_close(dtype):
    attention = Attention(32, 2, 'hallucinated')
    x = torch.randn(2, 1 + 40 * 30, 32, requires_grad=True)
    grid = Grid(40, 30, prefix=1)
    exact = attention(x, grid)
    with torch.autocast('cpu', dtype):
        out = attention(x, grid)
    assert (out - exact).norm() < 16 * torch.finfo(dtype).eps * exact.norm()
    out.float().square().mean().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize('learns', [False, True])
@both_forms
def test_no_map_of_all_pairs_is_built(form, learns, monkeypatch):
    """4 x the tokens: the largest tensor grows 4-fold, not 16-fold, in both directions."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                self.size = max(self.size, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    attention, sizes = Attention(DIM, HEADS, 'hallucinated'), []
    monkeypatch.setattr(hallucinated, '_BLOCK_NUMEL', 1024)
    monkeypatch.setenv('MMLINATTN_PRODUCTS', 'torch')  # a block of rows of softmax attention is of one size for both
    monkeypatch.setattr(dispatch, 'is_plain', lambda *_: form == 'reference')  # whoever watches sees the reference
    for side in (24, 48):
        x = torch.randn(1, side * side, DIM, requires_grad=learns)
        with Largest() as largest, torch.set_grad_enabled(learns):
            out = attention(x, Grid(side, side))
            if learns:
                out.sum().backward()
        sizes.append(largest.size)
    assert sizes[1] == 4 * sizes[0]


def test_who_stands_for_tensors_sees_it_whole():
    """Counters read the cost of the maps off its arguments, and call it in their turn."""
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is not ops.hallucinated_attention:
                return super().__torch_function__(func, types, args, kwargs)
            seen.append((args, kwargs))
            return func(*(t.as_subclass(torch.Tensor) if isinstance(t, Watched) else t for t in args), **kwargs)

    mixer, grid = build(('chh', 'ihh')), Grid(3, 4)
    q, k, v = tokens(12, 12)
    bias, mask = torch.randn(1, 6, 12, 12, dtype=torch.float64), torch.arange(12).expand(2, -1) < 9
    v = v * mask[..., None]
    options = dict(bias=bias, mask=mask)
    expected = mixer(q, k, v, grid, grid, **options)
    found = mixer(q, k.as_subclass(Watched), v, grid, grid, **options)
    torch.testing.assert_close(found, expected)
    ((args, kwargs),) = seen
    assert args[0] is q and args[2] is v and args[3:] == (6, grid)
    assert kwargs['bias'] is bias and kwargs['mask'] is mask and kwargs['cross_first'] is True
    assert kwargs['intra'].shape == kwargs['cross'].shape[:1] + (3, 3)


def test_steps_may_be_a_list():
    """As of a config."""
    mixer = HallucinatedMixer(DIM, HEADS, steps=['chh', 'ihh'])
    assert mixer.steps == ('chh', 'ihh') and mixer.chh_first and mixer.chh.bias is None and mixer.ihh.bias is not None
    assert HallucinatedMixer(DIM, HEADS).steps == ('ihh', 'chh')


@pytest.mark.parametrize('steps', ['ihh', None, ('ihh', 'ihh'), ('dhh',)], ids=str)
def test_unknown_steps(steps):
    with pytest.raises(ValueError, match=r"steps=.* have to be some of 'ihh' and 'chh'"):
        HallucinatedMixer(DIM, HEADS, steps=steps)


def test_heads_that_cannot_be_halved():
    with pytest.raises(ValueError, match='num_heads=8: hallucinated attention halves the width of a head, 3'):
        HallucinatedMixer(DIM, 8)
