# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Attention as a whole, projections, gate and local term included, against the equations."""

import pytest
import reference
import torch
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import TOKEN_MIXERS, Attention, FocusedMixer, Grid, RALAMixer, TokenMixer, get_mixer
from mmlinattn.attention.base import mean_token
from mmlinattn.layers import rotary_table
from mmlinattn.layers.linear import split_parts
from mmlinattn.ops import dispatch

DIM, HEADS, HEIGHT, WIDTH = 16, 2, 3, 5
HEAD_DIM = DIM // HEADS
GRID = Grid(HEIGHT, WIDTH)


def build(mixer, **options):
    attention = Attention(DIM, HEADS, mixer, **options).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def literal(attention, x, size, attention_map, gate):
    """``W_o ((A v + DWConv(v)) * gate)`` with A = ``attention_map(q, k)`` of every head."""
    q, k, v = (x @ attention.qkv.weight[i * DIM : (i + 1) * DIM].T for i in range(3))
    if attention.qkv.bias is not None:
        q, k, v = (t + attention.qkv.bias[i * DIM : (i + 1) * DIM] for i, t in enumerate((q, k, v)))
    heads = [t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in (q, k, v)]
    out = (attention_map(heads[0], heads[1]) @ heads[2]).transpose(1, 2).flatten(2)
    if attention.local is not None:
        out = out + reference.local_term(v, attention.local.weight, attention.local.bias, *size)
    gates = {
        None: lambda: 1.0,
        'projection': lambda: x @ attention.qkv.weight[3 * DIM :].T + attention.qkv.bias[3 * DIM :],
        'identity': lambda: x,
        'tanh': lambda: torch.sinh(x) / torch.cosh(x),
    }
    return (out * gates[gate]()) @ attention.proj.weight.T + attention.proj.bias


def check(attention, attention_map, gate, rotary):
    x = torch.randn(2, HEIGHT * WIDTH, DIM, dtype=torch.float64, requires_grad=True)
    table = rotary_table(HEIGHT, WIDTH, HEAD_DIM, dtype=torch.float64) if rotary else None
    fast = attention(x, GRID, rotary=table)
    slow = literal(attention, x, (HEIGHT, WIDTH), attention_map, gate)
    torch.testing.assert_close(fast, slow)
    probe = torch.randn_like(fast)
    leaves = [x, *attention.parameters()]
    ours = torch.autograd.grad((fast * probe).sum(), leaves)
    for mine, other in zip(ours, torch.autograd.grad((slow * probe).sum(), leaves)):
        torch.testing.assert_close(mine, other)


ABLATIONS = {
    'release': dict(),
    'paper': dict(scale_weights=False),
    'without KV augmentation': dict(augment_kv=False),
    'without output augmentation': dict(output_gate=None),
    'identity gate': dict(output_gate='identity'),
    'tanh gate': dict(output_gate='tanh'),
    'relu kernel': dict(kernel='relu'),
    'softmax kernel': dict(kernel='softmax'),
}


@pytest.mark.parametrize('local_kernel', [None, 5], ids=['', 'local'])
@pytest.mark.parametrize('rotary', [False, True], ids=['', 'rotary'])
@pytest.mark.parametrize('options', ABLATIONS.values(), ids=ABLATIONS)
def test_rala_and_its_ablations(options, rotary, local_kernel):
    attention = build(dict(type='rala', **options), local_kernel=local_kernel)
    name = options.get('kernel', 'elu')
    scale = 1.0 if not options.get('scale_weights', True) else HEAD_DIM**-0.5
    if not options.get('augment_kv', True):
        scale = None

    def attention_map(q, k):
        q, k = reference.kernel(q, name), reference.kernel(k, name)
        return reference.rala_map(q, k, (HEIGHT, WIDTH) if rotary else None, scale)

    check(attention, attention_map, options.get('output_gate', 'projection'), rotary)


@pytest.mark.parametrize('gate', [None, 'projection'])
@pytest.mark.parametrize('rotary', [False, True], ids=['', 'rotary'])
def test_softmax(rotary, gate):
    """The gate is the host's wish here: stages 3-4 of RAVLT have one."""
    attention = build('softmax', gate=gate, local_kernel=3)
    size = (HEIGHT, WIDTH) if rotary else None
    check(attention, lambda q, k: reference.softmax_map(q, k, size), gate, rotary)


@pytest.mark.parametrize('masked', [False, True])
def test_softmax_with_a_bias(masked):
    """Relative position tables of windows, with the padding of the window masked out."""
    attention = build('softmax')
    x = torch.randn(2, GRID.num_tokens, DIM, dtype=torch.float64)
    bias = torch.randn(1, HEADS, GRID.num_tokens, GRID.num_tokens, dtype=torch.float64)
    mask = torch.rand(2, GRID.num_tokens) > 0.4
    minus_infinity = torch.zeros(2, 1, 1, GRID.num_tokens, dtype=torch.float64)
    minus_infinity[~mask[:, None, None]] = float('-inf')
    expected_bias = bias + minus_infinity if masked else bias
    expected = literal(attention, x, None, lambda q, k: reference.softmax_map(q, k, bias=expected_bias), None)
    out = attention(x, GRID, mask=mask if masked else None, bias=bias)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('form', ['auto', 'reference'])
def test_softmax_with_all_its_options_at_once(form):
    """Values of another width than keys; an item whose keys are all hidden takes the mean of all, for nobody."""
    q, k, v = (torch.randn(3, HEADS, 15, d, dtype=torch.float64, requires_grad=True) for d in (8, 8, 6))
    bias = torch.randn(1, HEADS, 15, 15, requires_grad=True)  # float32, as tables are
    mask = torch.rand(3, 15) > 0.4
    mask[2] = False
    hidden = torch.zeros(3, 1, 1, 15, dtype=torch.float64).masked_fill(~mask[:, None, None], float('-inf'))
    table = rotary_table(3, 5, 8, dtype=torch.float64)
    with ops.use(form):
        out = reference.call_by_head(ops.softmax_attention, q, k, v, table, mask, bias)
        unmasked = reference.call_by_head(ops.softmax_attention, q, k, v, table, None, bias)
        rounded = reference.call_by_head(ops.softmax_attention, q, k, v, table, None, bias.half())
    torch.testing.assert_close(unmasked, reference.softmax_map(q, k, (3, 5), bias.double()) @ v)
    torch.testing.assert_close(rounded, reference.softmax_map(q, k, (3, 5), bias.half().double()) @ v)
    weights = reference.softmax_map(q[:2], k[:2], (3, 5), bias.double() + hidden[:2])
    torch.testing.assert_close(out[:2], weights @ v[:2])
    assert out.isfinite().all()
    leaves = [q, k, v, bias]
    probe = torch.randn_like(out[:2])
    grads = [torch.autograd.grad(result, leaves, probe) for result in (out[:2], weights @ v[:2])]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize('mixer', ['rala', 'softmax'])
def test_only_the_encodings_see_positions(mixer):
    """The paper's plain form permutes its outputs with its tokens."""
    x = torch.randn(2, GRID.num_tokens, DIM, dtype=torch.float64)
    order = torch.randperm(GRID.num_tokens)
    rotary = rotary_table(HEIGHT, WIDTH, HEAD_DIM, dtype=torch.float64)
    plain, local = build(mixer), build(mixer, local_kernel=3)
    torch.testing.assert_close(plain(x[:, order], GRID), plain(x, GRID)[:, order])
    for attention, table in ((plain, rotary), (local, None)):
        permuted = attention(x[:, order], GRID, rotary=table)
        assert (permuted - attention(x, GRID, rotary=table)[:, order]).abs().max() > 1e-2


@pytest.mark.parametrize('mixer', ['rala', 'softmax'])
def test_keys_of_other_tokens(mixer):
    """Keys and values of the tokens themselves, given as others, change nothing."""
    attention = build(mixer)
    x = torch.randn(2, GRID.num_tokens, DIM, dtype=torch.float64)
    torch.testing.assert_close(attention(x, GRID, kv=x, key_grid=GRID), attention(x, GRID))


def test_softmax_over_reduced_keys():
    """PVT's reduced keys: fewer of them than queries."""
    attention = build('softmax')
    x, reduced = (torch.randn(2, n, DIM, dtype=torch.float64) for n in (GRID.num_tokens, 4))
    out = attention(x, GRID, kv=reduced, key_grid=Grid(2, 2))
    both = torch.cat((reduced, x), dim=1)  # the reduced tokens as the only real ones of a longer sequence
    mask = torch.arange(both.shape[1]).expand(2, -1) < 4
    expected = attention(both, Grid(1, both.shape[1]), mask=mask)[:, 4:]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('mixer', ['rala', 'softmax'])
def test_a_class_token_has_no_neighbours(mixer):
    """It takes part in the attention, but the local term neither reads nor writes it."""
    attention = build(mixer, local_kernel=3)
    grid = Grid(HEIGHT, WIDTH, prefix=1)
    x = torch.randn(2, grid.num_tokens, DIM, dtype=torch.float64)
    out = attention(x, grid)
    kernel, attention.local = attention.local, None
    q, k, v, *gate = split_parts(attention.project(x))
    without = attention(x, grid)
    local = reference.local_term(v[:, 1:], kernel.weight, kernel.bias, HEIGHT, WIDTH)
    if gate:
        local = local * gate[0][:, 1:]
    torch.testing.assert_close(out[:, 0], without[:, 0])
    torch.testing.assert_close(out[:, 1:] - without[:, 1:], local @ attention.proj.weight.T)


@pytest.mark.parametrize('form', ['reference', 'fast'])
def test_no_map_of_all_pairs_is_built(form, monkeypatch):
    """4 x the tokens: the largest tensor of RALA grows 4-fold, not 16-fold."""
    if form == 'fast':  # what watches the operators gets the reference otherwise
        monkeypatch.setattr(dispatch, 'is_plain', lambda *tensors: False)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.size = max(self.size, out.numel())
            return out

    attention = Attention(DIM, HEADS, 'rala', local_kernel=5)
    sizes = []
    for side in (16, 32):
        with Largest() as largest, torch.no_grad():
            rotary = rotary_table(side, side, HEAD_DIM)
            attention(torch.randn(1, side * side, DIM), Grid(side, side), rotary=rotary)
        sizes.append(largest.size)
    assert sizes[1] == 4 * sizes[0]
    # the projection of everything, or of queries and keys
    assert sizes[0] == 16 * 16 * DIM * (4 if form == 'reference' else 2)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_mean_token_is_that_of_real_tokens(dtype):
    """Sums may leave the range of a half type; of padding alone the mean is zero."""
    x = (torch.rand(3, 6, 4) * 100 + 60000).to(dtype)
    mask = torch.tensor([[True, True, False, True, False, False], [False] * 6, [True] * 6])
    found = mean_token(x, mask)
    assert found.dtype == mean_token(x, None).dtype == dtype
    wide = x.double()
    expected = torch.stack((wide[0, [0, 1, 3]].mean(0), torch.zeros(4, dtype=torch.double), wide[2].mean(0)))
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0)
    torch.testing.assert_close(mean_token(x, None).double(), wide.mean(1), rtol=0.01, atol=0)


def test_a_new_attention_is_one_class():
    """Registered under a name, it works wherever the others do."""

    @TOKEN_MIXERS.register_module('mean of the values', force=True)
    class Mean(TokenMixer):
        @property
        def widths(self):
            return 0, 0, self.dim

        def forward(self, q, k, v, grid, key_grid, **_):
            return v.mean(dim=1, keepdim=True).expand_as(v)

    try:
        attention = build('mean of the values')
        out = attention(torch.randn(2, GRID.num_tokens, DIM, dtype=torch.float64), GRID)
        assert attention.qkv.weight.shape == (DIM, DIM)
        torch.testing.assert_close(out[:, :1].expand_as(out), out)
    finally:
        TOKEN_MIXERS._module_dict.pop('mean of the values')


@pytest.mark.parametrize('gate', [None, 'projection'])
def test_an_attention_may_want_any_widths(gate):
    """Of queries, keys and values, which its local term and the last projection then have; a gate has the values'
    only where they are as wide as the tokens."""

    class Narrow(TokenMixer):
        widths = 2, 3, 6 if gate is None else DIM

        def forward(self, q, k, v, grid, key_grid, **_):
            assert (q.shape[-1], k.shape[-1], v.shape[-1]) == self.widths
            return 2 * v + q.sum(-1, keepdim=True) - k.sum(-1, keepdim=True)

    attention = build(dict(type=Narrow), gate=gate, local_kernel=3)
    x = torch.randn(2, GRID.num_tokens, DIM, dtype=torch.float64)
    q, k, v, *gates = attention.qkv(x).split([*Narrow.widths, *([DIM] if gate else [])], dim=-1)
    out = 2 * v + q.sum(-1, keepdim=True) - k.sum(-1, keepdim=True)
    out = out + reference.local_term(v, attention.local.weight, attention.local.bias, HEIGHT, WIDTH)
    expected = attention.proj(out * gates[0] if gate else out)
    assert expected.shape == x.shape
    torch.testing.assert_close(attention(x, GRID), expected)


def test_unknown_attention_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown attention 'ralla'; known are .*'rala'.*'softmax'"):
        get_mixer('ralla')
    with pytest.raises(ValueError, match='unknown attention None'):
        get_mixer(dict(kernel='elu'))


def test_a_class_may_stand_for_its_name():
    assert get_mixer(dict(type=RALAMixer, kernel='elu')) == (RALAMixer, dict(kernel='elu'))
    with pytest.raises(ValueError, match="unknown attention <class 'torch.nn.modules.linear.Linear'>; known are"):
        get_mixer(dict(type=nn.Linear))


def test_the_options_of_an_attention_stay_what_they_are():
    """One dict of a config may name the attention of many blocks."""
    given = dict(type='rala', kernel='relu')
    assert get_mixer(given) == (RALAMixer, dict(kernel='relu'))
    assert given == dict(type='rala', kernel='relu')
    assert get_mixer('rala') == (RALAMixer, {})


@pytest.mark.parametrize('heads', [3, 0, -1])
def test_heads_have_to_divide_the_width(heads):
    with pytest.raises(ValueError, match=f'num_heads={heads} has to divide the width 16'):
        Attention(DIM, heads, 'rala')


@pytest.mark.parametrize('size', [4, 0, -3, 3.0, True])
def test_sizes_of_the_local_term(size):
    """Odd ones, which keep the size of the map."""
    for build_one in (
        lambda local_kernel: Attention(DIM, HEADS, 'rala', local_kernel=local_kernel).local,
        lambda local_kernel: FocusedMixer(DIM, HEADS, local_kernel=local_kernel).local,
    ):
        assert build_one(1).kernel_size == (1, 1) and build_one(None) is None
        with pytest.raises(ValueError) as error:
            build_one(size)
        assert str(error.value) == f'local_kernel={size!r} has to be None or an odd int >= 1'


@pytest.mark.parametrize('kernel', ['gelu', '', None])
def test_unknown_kernel(kernel):
    with pytest.raises(ValueError) as error:
        RALAMixer(DIM, HEADS, kernel=kernel)
    assert str(error.value) == f"kernel={kernel!r} has to be one of ['elu', 'relu', 'softmax']"


@pytest.mark.parametrize(
    'gate, options',
    [
        ('sigmoid', dict(mixer=dict(type='rala', output_gate='sigmoid'))),
        ('', dict(mixer=dict(type='rala', output_gate=''))),
        ('sigmoid', dict(mixer='softmax', gate='sigmoid')),
    ],
)
def test_unknown_gate(gate, options):
    with pytest.raises(ValueError, match=f"gate='{gate}' has to be None, 'projection', 'identity' or 'tanh'"):
        Attention(DIM, HEADS, **options)


@pytest.mark.parametrize('reduced', [False, True])
def test_an_adapter_in_place_of_the_projection_is_called(reduced):
    """One that keeps the layer's weight under its name, which alone would leave the adapter out."""

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    attention = Attention(DIM, HEADS, 'softmax')
    plain, x = attention.qkv, torch.randn(2, 12, DIM)
    kv = x[:, ::2] if reduced else None
    attention.qkv = Adapter(DIM, plain.out_features)
    attention.qkv.load_state_dict(plain.state_dict())
    shared = dict(kv=kv, key_grid=Grid(2, 3)) if reduced else {}
    adapted = attention(x, Grid(3, 4), **shared)
    attention.qkv = plain
    plain.bias.data += 1
    torch.testing.assert_close(adapted, attention(x, Grid(3, 4), **shared))
