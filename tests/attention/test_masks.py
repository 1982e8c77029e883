# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What every attention does with tokens that are not real: nothing."""

import pytest
import torch
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import Attention, Grid
from mmlinattn.layers import rotary_table

DIM, HEADS, HEIGHT, WIDTH = 16, 2, 3, 5
MIXERS = {
    'rala': dict(type='rala'),
    'rala without weights': dict(type='rala', augment_kv=False),
    'rala, relu': dict(type='rala', kernel='relu'),
    'softmax': dict(type='softmax'),
    'inline': dict(type='inline'),
    'inline, relu': dict(type='inline', kernel='relu'),
    'inline, leakyrelu': dict(type='inline', kernel='leakyrelu'),
    'inline, exp': dict(type='inline', kernel='exp'),
    'inline, division': dict(type='inline', kernel='exp', injective=False),
    'focused': dict(type='focused'),
    'focused, relu': dict(type='focused', focus=False),
    'hallucinated': dict(type='hallucinated'),
    'hallucinated, chh first': dict(type='hallucinated', steps=('chh', 'ihh')),
    'hydra': dict(type='hydra'),
    'efficient': dict(type='efficient'),
    'angular': dict(type='angular'),
    'angular, paper': dict(type='angular', form='paper'),
    'enhanced': dict(type='enhanced'),
}
every_mixer = pytest.mark.parametrize('mixer', MIXERS.values(), ids=MIXERS)


def build(mixer, **options):
    attention = Attention(DIM, HEADS, mixer, **options).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


@pytest.mark.parametrize('padding', [0.0, 3.0, 30.0, 1e3])
@every_mixer
def test_padding_changes_nothing_for_the_real_tokens(mixer, padding):
    """A 3x5 map inside a 4x7 one, whatever the padding holds: attention, means and convolutions of the values."""
    if mixer.get('kernel') == 'exp' and padding > 100:
        pytest.skip('exp overflows')
    attention = build(mixer, local_kernel=5)
    x = torch.randn(2, HEIGHT, WIDTH, DIM, dtype=torch.float64)
    padded = torch.full((2, 4, 7, DIM), padding, dtype=torch.float64)
    padded[:, :HEIGHT, :WIDTH] = x
    mask = torch.zeros(2, 4, 7, dtype=torch.bool)
    mask[:, :HEIGHT, :WIDTH] = True
    small, large = (rotary_table(*size, DIM // HEADS, dtype=torch.float64) for size in ((HEIGHT, WIDTH), (4, 7)))
    out = attention(padded.flatten(1, 2), Grid(4, 7), mask=mask.flatten(1), rotary=large)
    alone = attention(x.flatten(1, 2), Grid(HEIGHT, WIDTH), rotary=small)
    torch.testing.assert_close(out[mask.flatten(1)].unflatten(0, (2, -1)), alone)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_mixer
def test_a_window_of_padding_only_has_no_values_and_finite_gradients(mixer, dtype, request):
    """The second item is padding, also where it meets a loss."""
    attention = build(mixer).to(torch.promote_types(dtype, torch.float32))
    mask = torch.ones(2, HEIGHT * WIDTH, dtype=torch.bool)
    mask[1] = False
    x = torch.randn(2, HEIGHT * WIDTH, DIM, dtype=attention.qkv.weight.dtype, requires_grad=True)
    mixed = []
    attention.mixer.register_forward_hook(lambda module, inputs, out: mixed.append(out))
    with torch.autocast('cpu', dtype, enabled=dtype.itemsize < 4):
        out = attention(x, Grid(HEIGHT, WIDTH), mask=mask)
    local_terms = [m for m in attention.mixer.modules() if isinstance(m, nn.Conv2d)]  # their biases are not masked
    assert local_terms or not mixed[0][1].any()
    assert out.isfinite().all()
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    assert x.grad.isfinite().all()
    with torch.no_grad(), torch.autocast('cpu', dtype, enabled=dtype.itemsize < 4):
        assert attention(x, Grid(HEIGHT, WIDTH), mask=mask).isfinite().all()
    assert local_terms or not mixed[1][1].any()


OVER_KEYS = {
    'softmax': lambda q, k, v, mask=None: ops.softmax_attention(q, k, v, HEADS, mask=mask),
    'hallucinated': lambda q, k, v, mask=None: ops.hallucinated_attention(
        *(t[..., : DIM // 2] for t in (q, k)), v, 2 * HEADS, Grid(1, 5), cross=CROSS, mask=mask
    ),
    'hallucinated, copies': lambda q, k, v, mask=None: ops.hallucinated_attention(
        *(t[..., : DIM // 2] for t in (q, k)), v, 2 * HEADS, Grid(1, 5), mask=mask
    ),
    'efficient': lambda q, k, v, mask=None: ops.efficient_attention(q, k, v, HEADS, mask),
}
CROSS = torch.tensor([[0.5, 1.0], [-1.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize('form', ['auto', 'reference'])
@pytest.mark.parametrize('learns', [True, False])
@pytest.mark.parametrize('name', OVER_KEYS)
def test_softmax_over_hidden_keys_alone_is_their_mean(name, learns, form):
    """No NaN, whatever PyTorch's kernels make of rows without a key; callers set such values to zero."""
    q, k, v = (torch.randn(2, 5, DIM, dtype=torch.float64) for _ in range(3))
    mask, op = torch.tensor([[True] * 5, [False] * 5]), OVER_KEYS[name]
    with ops.use(form), torch.set_grad_enabled(learns):
        out = op(q, k, v, mask)
        torch.testing.assert_close(out[:1], op(q[:1], k[:1], v[:1]))
    torch.testing.assert_close(out[1], v[1].mean(dim=0).expand(5, -1))
