# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Every attention against its reference implementation with N x N attention maps (:mod:`helpers.references`)."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import references
from helpers.references import ATTENTIONS, DIM, HEAD_DIM, HEADS, assert_same, attend, build, form, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import TOKEN_MIXERS, Attention, Grid, SoftmaxMixer, StageContext
from mmlinattn.attention.arrangements import ReducedAttention, StripeAttention, WindowAttention
from mmlinattn.attention.mixer import LocalMixer, TokenMixer, get_mixer
from mmlinattn.layers import rotary_table

every_attention = pytest.mark.parametrize('name', ATTENTIONS)
few = settings(deadline=None, derandomize=True, max_examples=8)


def table(height, width):
    return rotary_table(height, width, HEAD_DIM, dtype=torch.float64)


@every_attention
@few
@example(3, 5, 0, True, 'projection', 3, True, 'auto', 2, 40)
@example(2, 3, 1, False, None, None, False, 'reference', 2, 2**21)
@given(
    height=st.integers(1, 4),
    width=st.integers(1, 5),
    prefix=st.integers(0, 2),
    encoded=st.booleans(),
    gate=st.sampled_from([None, 'projection', 'identity', 'tanh']),
    local_kernel=st.sampled_from([None, 1, 3, 5]),
    qkv_bias=st.booleans(),
    backend=st.sampled_from(references.FORMS),
    batch=st.integers(1, 2),
    block=st.sampled_from([1, 40, 200, 2**21]),
)
def test_its_reference(name, height, width, prefix, encoded, gate, local_kernel, qkv_bias, backend, batch, block):
    """Compare values and gradients. Batched and blockwise results are equal."""
    torch.manual_seed(0)
    attention = build(name, grid=(3, 4) if encoded else None, gate=gate, local_kernel=local_kernel, qkv_bias=qkv_bias)
    mixer, grid = attention.mixer, Grid(height, width, prefix)
    assert (attention.qkv.bias is not None) == qkv_bias
    x, source = (tokens(batch, grid.num_tokens) for _ in range(2))
    is_turned = encoded and not prefix
    bias = torch.randn(1, mixer.num_heads, *2 * [grid.num_tokens], dtype=torch.float64, requires_grad=True)
    leaves = [x, source, bias, *attention.parameters()]
    shared = dict(bias=bias if encoded else None, rotary=table(height, width) if is_turned else None)
    with form(backend), mock.patch.object(ops.tokens, 'BLOCK_NUMEL', block):
        out = attend(attention, x, grid, source=source, **shared)
        size = (height, width) if is_turned and mixer.rotary else None
        slow = references.reference(
            attention, name, x, grid, size=size, bias=bias if encoded and mixer.bias else None, context=source
        )
        # gradients of a norm of few numbers, and of powers, may be large
        assert_same(out, slow, leaves, rtol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(attend(attention, x, grid, source=source, **shared), out)
        if not encoded:
            torch.testing.assert_close(attention(x, StageContext(grid, source=source)), out)


@every_attention
@few
@example(4, 5, 2, 3, 'reference')
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from(references.FORMS))
def test_keys_of_other_tokens(name, height, width, rows, columns, backend):
    attention, spec = build(name, grid=(3, 4)), ATTENTIONS[name]
    if name in references.OWN_VALUE:
        with pytest.raises(ValueError, match=r'as many keys as queries \(6\), not 4; released=False takes any'):
            attend(attention, tokens(2, 6), Grid(2, 3), tokens(2, 4), Grid(2, 2))
        return
    torch.manual_seed(0)
    mixer, one = attention.mixer, tokens(1, 1)
    convolves = isinstance(mixer, LocalMixer) and mixer.convolve(one, Grid(1, 1), one[:, 0]) is not None
    if spec['type'] == 'rala' or convolves:  # as many keys
        rows, columns = height, width
    grid, key_grid = Grid(height, width), Grid(rows, columns)
    x, kv = tokens(2, grid.num_tokens), tokens(2, key_grid.num_tokens)
    slow = references.reference(attention, name, x, grid, kv, key_grid)
    with form(backend):
        assert_same(attend(attention, x, grid, kv, key_grid), slow, [x, kv, *attention.parameters()], rtol=1e-6)


@pytest.mark.parametrize('name', [name for name in ATTENTIONS if not build(name).mixer.sequential])  # as in windows
@few
@example(3, 5, (0, 1, 1, 0), 1e3, 'auto', True)
@example(3, 4, (1, 1, 0, 2), 30.0, 'reference', False)
@given(
    height=st.integers(1, 3),
    width=st.integers(1, 4),
    around=st.tuples(*[st.integers(0, 2)] * 4),
    held=st.sampled_from([0.0, 3.0, -30.0, 1e3]),
    backend=st.sampled_from(references.FORMS),
    local=st.booleans(),
)
def test_padding_changes_nothing_for_the_valid_tokens(name, height, width, around, held, backend, local):
    torch.manual_seed(0)
    attention = build(name, local_kernel=3 if local else None)
    held = min(held, 30.0) if name in references.OVERFLOWING else held
    top, bottom, left, right = around
    whole = Grid(height + top + bottom, width + left + right)
    mask = torch.zeros(whole[:2], dtype=torch.bool)
    mask[top : top + height, left : left + width] = True
    mask = mask.flatten().expand(2, -1)
    x = tokens(2, height * width)
    padded = torch.full((2, whole.num_tokens, DIM), held, dtype=torch.float64)
    padded = padded.masked_scatter(mask[..., None], x)
    bias = torch.randn(1, attention.mixer.num_heads, *2 * [whole.num_tokens], dtype=torch.float64)
    real = mask[0].nonzero()[:, 0]
    with form(backend):
        out = attend(attention, padded, whole, mask=mask, rotary=table(*whole[:2]), bias=bias)[:, real]
        alone = bias[..., real, :][..., real]
        alone = attend(attention, x, Grid(height, width), rotary=table(height, width), bias=alone)
        assert_same(out, alone, [x, *attention.parameters()], rtol=1e-6)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_attention
def test_a_window_of_padding_only_has_no_values_and_finite_gradients(name, dtype):
    attention = build(name).to(torch.promote_types(dtype, torch.float32))
    mask = torch.tensor([[True] * 15, [False] * 15])
    x = torch.randn(2, 15, DIM, dtype=attention.qkv.weight.dtype, requires_grad=True)
    mixed = []
    attention.mixer.register_forward_hook(lambda module, inputs, out: mixed.append(out))
    for learns in (True, False):
        with torch.autocast('cpu', dtype, enabled=dtype.itemsize < 4), torch.set_grad_enabled(learns):
            out = attend(attention, x, Grid(3, 5), mask=mask)
        assert out.isfinite().all()
        # biases of convolutions are not masked
        assert ATTENTIONS[name]['type'] == 'focused' or not mixed[-1][1].any()
        if learns:
            out.float().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in (x, *attention.parameters()))


def test_a_backbone_gates_those_that_have_no_opinion():
    """Let RALA without output augmentation (Tab. 9) stay ungated."""
    for gate, found in (('projection', [None, 'projection', 'projection']), (None, [None, 'projection', None])):
        assert [build(name, gate=gate).gate for name in ('rala, no gate', 'rala', 'softmax')] == found

    class Gated(SoftmaxMixer):  # on the instance, not on the class
        def __init__(self, *args, own='tanh', **kwargs):
            super().__init__(*args, **kwargs)
            self.gate = own

    # 'host' is the former name of 'backbone'
    for own, gate in (('tanh', 'tanh'), ('backbone', 'projection'), ('host', 'projection')):
        assert Attention(DIM, HEADS, dict(type=Gated, own=own), gate='projection').gate == gate


@pytest.mark.parametrize('gate', [None, 'projection', 'identity'])
@pytest.mark.parametrize('local_kernel', [None, 3])
def test_a_new_attention_is_one_class(gate, local_kernel):
    """Register a mixer with its own channels of queries, keys and values. Its output may be an expanded view."""

    def mean(q, k, v):
        return (2 * v + q.sum(-1, keepdim=True) - k.sum(-1, keepdim=True)).mean(dim=1, keepdim=True).expand_as(v)

    @TOKEN_MIXERS.register_module('narrow', force=True)
    class Narrow(TokenMixer):
        widths = 2, 3, DIM if gate == 'identity' else 6

        def forward(self, q, k, v, grid, key_grid, **_):
            return mean(q, k, v)

    try:
        attention, x = build('narrow', gate=gate, local_kernel=local_kernel), tokens(2, 15)
        assert get_mixer(dict(type=Narrow, a=1)) == (Narrow, dict(a=1))  # a class may stand for its name
    finally:
        TOKEN_MIXERS._module_dict.pop('narrow')
    q, k, v, *gates = attention.qkv(x).split([*Narrow.widths, *([6] if gate == 'projection' else [])], dim=-1)
    out = mean(q, k, v)
    if local_kernel:
        out = out + references.sum_of(attention.local.weight[None], v, Grid(3, 5)) + attention.local.bias
    if gate:
        out = out * (gates[0] if gates else x)
    out = attention.proj(out)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(attention(x, StageContext(Grid(3, 5))), out)


def test_every_registered_attention_has_a_reference_and_a_row_in_the_documentation():
    ours = {name for name, kind in TOKEN_MIXERS.module_dict.items() if kind.__module__.startswith('mmlinattn.')}
    assert set(references.FIRST) == ours
    page = (Path(__file__).parents[2] / 'docs' / 'attentions.md').read_text(encoding='utf-8')
    assert {line.split('`')[1] for line in page.splitlines() if line.startswith('| `')} == ours


class Wide(SoftmaxMixer):
    widths = DIM, DIM, 2 * DIM


LN = dict(type='LN')
INPUTS = 'identity', 'tanh'
GATES = ["gate='{}'", "None, 'projection', 'identity' or 'tanh'"]
SEQUENTIAL = [spec for name, spec in ATTENTIONS.items() if build(name).mixer.sequential]
ERRORS = [  # class, its arguments, words of the error: argument, value, allowed values
    (get_mixer, ('ralla',), ["'ralla'", "'rala'", "'softmax'"]),
    (get_mixer, (dict(kernel='elu'),), ['stage_attns', 'None', "'rala'"]),
    (get_mixer, (dict(type=nn.Linear),), ['Linear', "'rala'"]),
    *((Attention, (DIM, heads, 'rala'), [f'num_heads={heads}', '16']) for heads in (3, 0, -1)),
    *((Attention, (DIM, HEADS, 'rala', None, k), [f'local_kernel={k!r}', 'odd int']) for k in (4, 0, -3, 3.0, True)),
    *((Attention, (DIM, HEADS, spec), words) for spec, words in references.ERRORS),
    (Attention, (DIM, HEADS, dict(type='rala', output_gate='')), [GATES[0].format(''), GATES[1]]),
    (Attention, (DIM, HEADS, 'softmax', None, None, 'sigmoid'), [GATES[0].format('sigmoid'), GATES[1]]),
    *((Attention, (DIM, HEADS, dict(type=Wide), None, None, gate), [f'gate={gate!r}', 'Wide']) for gate in INPUTS),
    (Attention, (24, 8, 'hallucinated'), ['num_heads=8', 'even']),
    *((WindowAttention, (DIM, HEADS, spec, (3, 3)), [repr(spec), 'windows and stripes']) for spec in SEQUENTIAL),
    *((StripeAttention, (DIM, HEADS, spec, 3), [repr(spec), 'windows and stripes']) for spec in SEQUENTIAL),
    (StripeAttention, (24, 3, 'softmax', 2), ['num_heads=3', 'even']),
    (StripeAttention, (DIM, HEADS, ATTENTIONS['rala, tanh'], 2), ["gate='tanh'", 'stripes']),
    (WindowAttention, (DIM, HEADS, 'inline', (4, 4), True), ["shift=True: 'inline' takes no bias"]),
    (ReducedAttention, (DIM, HEADS, 'inline', 2, LN), ["ratio=2: 'inline' adds"]),
    (partial(ReducedAttention, local_kernel=3), (DIM, HEADS, 'softmax', 2, LN), ["ratio=2: 'softmax' adds"]),
    (ops.rala, (tokens(1, 12), tokens(1, 3), tokens(1, 3), HEADS), ['q has 12 tokens and k 3']),
    # its index and bias would take a GiB a block
    (WindowAttention, (DIM, HEADS, 'softmax', (1, 8193), False, True), ['window_size=(1, 8193)', '8192']),
]


@pytest.mark.parametrize(('build', 'arguments', 'words'), ERRORS, ids=range(len(ERRORS)))
def test_errors(build, arguments, words):
    with pytest.raises(ValueError) as error:
        build(*arguments)
    assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)
