# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What is caught of attentions while they run: features of every arrangement, hooks that go away, words for others."""

import pytest
import torch
from torch import nn

from mmlinattn.analysis.capture import MixerCall, arguments_of, arrangements, reduction_of, token_layout, watched
from mmlinattn.analysis.weights import state_keys
from mmlinattn.attention import (
    TOKEN_MIXERS,
    GlobalAttention,
    Grid,
    ReducedAttention,
    StripeAttention,
    TokenMixer,
    WindowAttention,
)
from mmlinattn.attention.arrangements import Attention
from mmlinattn.backbones import LinearDeiT
from mmlinattn.layers import rotary_table

ARRANGEMENTS = {
    'windows, cut at the border': (lambda: WindowAttention(8, 2, 'rala', (4, 4)), 1, 2),
    'windows, shifted': (lambda: WindowAttention(8, 2, 'softmax', (4, 4), shift=True), 1, 2),
    'reduced keys': (lambda: ReducedAttention(8, 2, 'softmax', 2, dict(type='LN')), 1, 2),
    'stripes': (lambda: StripeAttention(8, 2, 'softmax', 2), 2, 1),
    'stripes, gate': (lambda: StripeAttention(8, 4, 'rala', 2), 2, 2),
    'the input for a gate': (lambda: GlobalAttention(8, 2, dict(type='rala', output_gate='identity')), 1, 2),
}
GATES = 'projection', 'identity', 'tanh'


@pytest.mark.parametrize(('make', 'branches', 'heads'), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_features_are_what_the_output_projection_sees(make, branches, heads):
    """With convolution and gate, token by token of a map of 5 x 6, heads of each branch in their order."""
    attention, found = make().eval(), []
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 5, 6, 8)
    model = nn.ModuleDict(dict(block=nn.ModuleDict(dict(attn=attention))))
    with watched(model, lambda block: found.append((block, block.features()))):
        out = attention(x)
    ((block, features),) = found
    assert block.name == 'block' and block.size == (5, 6) and len(features) == len(block.branches) == branches
    assert all(mixed.shape == whole.shape == (heads, 30, 8 // branches // heads) for mixed, whole in features)
    for branch, (mixed, _) in zip(block.branches, features):  # the mixer's own, without convolution and gate
        for call in branch:
            real = call.queries >= 0
            assert torch.equal(mixed.transpose(0, 1).flatten(1)[call.queries[real]], call.out[real])
    merged = torch.cat([whole.transpose(0, 1).flatten(1) for _, whole in features], dim=-1)
    torch.testing.assert_close(attention.proj(merged).unflatten(0, (5, 6))[None], out, rtol=1e-4, atol=1e-5)


def test_attentions_are_found_once_and_in_order():
    stripes = StripeAttention(8, 2, 'softmax', 2)
    model = nn.ModuleDict(
        dict(a=nn.ModuleDict(dict(attn=stripes)), b=nn.Linear(1, 1), a2=GlobalAttention(8, 2, 'rala'))
    )
    assert arrangements(model) == {'a.attn': stripes, 'a2': model['a2']}  # not the two directions of stripes
    model['a']['attn2'] = GlobalAttention(8, 2, 'rala')  # a name that begins alike is another one
    assert list(arrangements(model)) == ['a.attn', 'a.attn2', 'a2']
    assert reduction_of(stripes) == reduction_of(model['a2']) == 1
    assert reduction_of(ReducedAttention(8, 2, 'softmax', 4, dict(type='LN'))) == 4
    assert reduction_of(type('Averages', (nn.Module,), dict(reduction='sequence', ratio=4))()) == 0


def test_nothing_stays_behind():
    """Hooks go also where something fails; no gradients meanwhile; each image is a call of its own."""
    model, found = nn.Sequential(GlobalAttention(8, 2, 'softmax')).eval(), []
    with pytest.raises(KeyError), watched(model, found.append):
        assert not model(torch.randn(1, 3, 4, 8)).requires_grad
        model(torch.randn(1, 4, 4, 8))
        raise KeyError
    assert [(block.size, len(block.calls)) for block in found] == [((3, 4), 1), ((4, 4), 1)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model(torch.randn(1, 3, 4, 8)).requires_grad and len(found) == 2


def test_a_pass_that_failed_halfway_leaves_nothing():
    """Neither what was refused nor what raised becomes part of the next image."""
    model, found = nn.Sequential(GlobalAttention(8, 2, 'softmax')).eval(), []
    with watched(model, found.append):
        with pytest.raises(ValueError, match='one image at a time, not 2'):
            model(torch.randn(2, 3, 4, 8))
        model(torch.randn(1, 4, 4, 8))
        with pytest.raises(RuntimeError):
            model[0].proj.weight.data = torch.randn(8, 7)  # after the mixer
            model(torch.randn(1, 3, 4, 8))
        model[0].proj.weight.data = torch.randn(8, 8)
        model(torch.randn(1, 4, 3, 8))
    assert [(block.size, len(block.calls)) for block in found] == [((4, 4), 1), ((4, 3), 1)]


def test_arguments_are_copies_by_their_names():
    mixer, (q, k, v) = GlobalAttention(8, 2, 'softmax').mixer, torch.randn(3, 1, 6, 8)
    given = arguments_of(mixer, (q, k, v, Grid(2, 3), None), dict(rotary='r'))
    assert all(torch.equal(given[name], t) and given[name] is not t for name, t in zip('qkv', (q, k, v)))
    assert given['grid'] == given['key_grid'] == Grid(2, 3) and given['rotary'] == 'r'
    assert given['mask'] is given['bias'] is given['context'] is None and 'self' not in given
    assert arguments_of(mixer, (q, k, v, Grid(2, 3), Grid(1, 6)), {})['key_grid'] == Grid(1, 6)


GATED = {
    **{
        str(gate): lambda gate=gate: GlobalAttention(8, 2, 'inline', local_kernel=3, gate=gate)
        for gate in (None, *GATES)
    },
    'reduced keys': lambda: ReducedAttention(8, 2, 'softmax', 2, dict(type='LN'), gate='tanh'),
    'windows': lambda: WindowAttention(8, 2, 'rala', (4, 4)),
    'stripes': lambda: StripeAttention(8, 4, 'rala', 2),
    'an arrangement of a user': lambda: Doubled(8, 2, 'softmax'),
}


class Doubled(GlobalAttention):
    """Calls its mixer, and writes over what that gives."""

    def mix(self, q, k, v, grid, **_):
        return self.mixer(q, k, v, grid, grid).mul_(2)


@pytest.mark.parametrize('make', GATED.values(), ids=GATED)
def test_what_a_mixer_was_given_and_gave_is_kept_as_it_was(make):
    """Gates and convolutions write over its output, mixers over their queries and keys; in inference."""
    attention, given, gave, found = make().eval(), [], [], []
    nn.init.normal_(attention.qkv.weight)
    for module in attention.modules():
        if isinstance(module, TokenMixer):
            module.register_forward_pre_hook(lambda mixer, args: given.append([t.clone() for t in args[:3]]))
            module.register_forward_hook(lambda mixer, args, out: gave.append(out.clone()))
    with watched(nn.Sequential(attention), found.append):
        attention(torch.randn(1, 5, 6, 8))
    (block,) = found
    assert len(block.calls) == len(given) == len(gave)
    for call, tokens, out in zip(block.calls, given, gave):
        assert torch.equal(call.out, out)
        assert all(torch.equal(call.given[name], t) for name, t in zip('qkv', tokens))
        rows = (call.queries[0] >= 0).nonzero()[:, 0]
        assert call.error(0, rows, call.weights(0, rows)) < 1e-5


class Halves(Attention):
    """Tokens in an order that nobody else has."""

    def forward(self, x, **shared):
        tokens = x.flatten(1, 2).unflatten(1, (2, -1))[0]
        return super().forward(tokens, Grid(1, tokens.shape[1])).flatten(0, 1).view_as(x)


def test_an_arrangement_that_is_not_known_is_named():
    attention = Halves(8, 2, 'softmax').eval()
    with pytest.raises(NotImplementedError, match='Halves lays its tokens in a way that the analysis does not know'):
        with watched(nn.Sequential(attention), print):
            attention(torch.randn(1, 4, 4, 8))


def test_names_of_attentions():
    class Own(TokenMixer):
        def forward(self, q, k, v, grid, key_grid, mask=None, rotary=None, bias=None, context=None):
            return v

    class Another(type(GlobalAttention(8, 2, 'softmax').mixer)):
        pass

    names = []
    for mixer in ('hydra', dict(type=Own), dict(type=Another)):
        attention = GlobalAttention(8, 2, mixer).eval()
        with watched(nn.Sequential(attention), lambda block: names.append(block.mixer_name)):
            attention(torch.randn(1, 2, 2, 8))
    assert names == ['hydra', 'Own', 'Another']  # not what it is derived from


def test_names_of_blocks():
    """Those of the modules that have the attentions, where these have the name that is usual."""
    attentions = {name: GlobalAttention(8, 2, 'softmax') for name in ('attn', 'attn_2')}
    model, names = nn.ModuleDict(dict(attns=nn.ModuleDict(attentions), last=GlobalAttention(8, 2, 'softmax'))), []
    with watched(model, lambda block: names.append(block.name)):
        for attention in (*attentions.values(), model['last']):
            attention(torch.randn(1, 2, 2, 8))
    assert names == ['attns', 'attns.attn_2', 'last']


def test_where_tokens_lie():
    """Class tokens first; windows of 2 x 2 on a map of 3 x 2, whose padding is -1."""
    attention = GlobalAttention(8, 2, 'softmax')
    q = torch.zeros(1, 7, 8)
    given = [dict(q=q, k=q, grid=Grid(2, 3, prefix=1), key_grid=Grid(2, 3, prefix=1))]
    size, key_size, ((queries, keys),) = token_layout(attention, q, given)
    assert size == key_size == (2, 3) and queries.tolist() == keys.tolist() == [[-2, 0, 1, 2, 3, 4, 5]]
    found = []
    windows = WindowAttention(8, 2, 'softmax', (2, 2)).eval()
    with watched(nn.Sequential(windows), found.append):
        windows(torch.randn(1, 3, 2, 8))
    places = torch.cat([call.queries.flatten() for call in found[0].calls]).tolist()
    assert sorted(place for place in places if place >= 0) == list(range(6)) and set(places) <= {-1, *range(6)}


@pytest.mark.parametrize('mixer', ['softmax', 'inline', 'focused'])
def test_weights_with_convolutions_are_the_whole_of_what_is_mixed(mixer):
    """Where all channels of a head have one kernel, their mean is no loss: of the mixer's own and that around it."""
    attention, found = GlobalAttention(8, 2, mixer, local_kernel=3).eval(), []
    nn.init.normal_(attention.qkv.weight)
    with torch.no_grad():
        for convolution in (attention.local, getattr(attention.mixer, 'local', None)):
            if convolution is not None:
                size, width = convolution.kernel_size[0], len(convolution.weight)
                one = torch.randn(width // 4, 1, size, size).repeat_interleave(4, dim=0)
                convolution.weight.copy_(one)
                convolution.bias.zero_()
    with watched(nn.Sequential(attention), found.append):
        attention(torch.randn(1, 4, 5, 8))
    (block,) = found
    (call,) = block.calls
    rows, v = torch.tensor([0, 7, 19]), call.given['v'][0].unflatten(-1, (2, 4)).transpose(0, 1)
    if mixer == 'inline':  # kernels that are predicted differ by channel: their mean is what is added
        own, around = call.local_kernels()
        assert own.shape == around.shape == (1, 8, 3, 3)
        added = (call.weights(0, rows, local=True) - call.weights(0, rows))[:, 1].unflatten(-1, (4, 5))
        mean = (own + around)[0].unflatten(0, (2, 4)).mean(dim=1)
        torch.testing.assert_close(added[:, :3, 1:4], mean)  # around the token in row 1, column 2
        assert not added[:, 3].any() and not added[:, :, 0].any() and not added[:, :, 4].any()
        return
    ((_, whole),) = block.features()
    torch.testing.assert_close(call.weights(0, rows, local=True) @ v, whole[:, rows], rtol=1e-4, atol=1e-5)
    assert len(call.local_kernels()) == (1 if mixer == 'softmax' else 2)


def test_each_window_has_the_kernels_that_were_predicted_for_it():
    attention, found = WindowAttention(8, 2, 'inline', (4, 4)).eval(), []
    nn.init.normal_(attention.qkv.weight)
    with watched(nn.Sequential(attention), found.append), torch.no_grad():
        attention(torch.randn(1, 8, 8, 8))
    (call,) = found[0].calls
    (kernels,) = call.local_kernels()
    assert kernels.shape == (4, 8, 3, 3) and (kernels[0] - kernels[3]).abs().max() > 0.1
    rows = torch.tensor([5])  # row 1, column 1 of the window
    for window in range(4):
        added = call.weights(window, rows, local=True) - call.weights(window, rows)
        expected = kernels[window].unflatten(0, (2, 4)).mean(dim=1)
        torch.testing.assert_close(added[:, 0].unflatten(-1, (4, 4))[:, :3, :3], expected)


@pytest.mark.parametrize('mixer', ['softmax', 'rala', 'angular'])
def test_wrong_weights_have_an_error(mixer):
    """Twice the weights: as far away as there is weight."""
    attention, found = GlobalAttention(8, 2, mixer).eval(), []
    with watched(nn.Sequential(attention), found.append):
        attention(torch.randn(1, 4, 5, 8))
    (call,), rows = found[0].calls, torch.arange(20)
    weights = call.weights(0, rows)
    assert call.error(0, rows, weights) < 1e-5
    wrong = call.error(0, rows, 2 * weights)
    assert wrong == pytest.approx(1, abs=1e-5) if mixer != 'angular' else wrong > 0.1


@pytest.mark.parametrize('mixer', ['softmax', 'inline'])
def test_nothing_has_no_error(mixer):
    """Values that are zero, as of weights that are, of an attention with or without a convolution of its own."""
    attention, found = GlobalAttention(8, 2, mixer).eval(), []
    nn.init.zeros_(attention.qkv.weight), nn.init.zeros_(attention.qkv.bias)
    with watched(nn.Sequential(attention), found.append):
        attention(torch.randn(1, 4, 5, 8))
    (call,), rows = found[0].calls, torch.arange(20)
    assert call.error(0, rows, call.weights(0, rows)) == 0


def test_states():
    """Sums of keys and values of each head; none for softmax attention."""
    states = []
    for mixer in ('softmax', 'enhanced'):
        attention = GlobalAttention(8, 2, mixer).eval()
        with watched(nn.Sequential(attention), lambda block: states.append((block.calls[0].state(0), block.calls[0]))):
            attention(torch.randn(1, 4, 5, 8))
    assert states[0][0] is None
    state, call = states[1]
    k, v = (call.given[name][0].unflatten(-1, (2, 4)).transpose(0, 1) for name in 'kv')
    torch.testing.assert_close(
        state / state.norm(), (nn.functional.relu(k).mT @ v) / (nn.functional.relu(k).mT @ v).norm()
    )


def test_what_a_state_is_made_of():
    """The keys and values of its window in float32, with the window's mask and the rotary encoding."""
    (q, k, v), mixer = torch.randn(3, 2, 6, 8).half(), TOKEN_MIXERS.get('rala')(8, 2)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    grid, rotary = Grid(2, 3), rotary_table(2, 3, 4)
    given = dict(q=q, k=k, v=v, grid=grid, key_grid=grid, mask=mask, rotary=rotary)
    state = MixerCall(mixer, given, None, None, None, None).state(1)
    keys = state_keys(mixer, q[1:].float(), k[1:].float(), grid, mask[1:], rotary)[0]
    assert not keys[:, 4:].any()
    torch.testing.assert_close(state, keys.mT @ v[1].float().unflatten(-1, (2, 4)).transpose(0, 1))


def test_padding_of_stripes_is_in_no_state():
    """A map of 5 rows in stripes of 2: the last one has a row of tokens that are none."""
    attention, found = StripeAttention(8, 2, 'enhanced', 2).eval(), []
    nn.init.ones_(attention.qkv.bias)
    with watched(nn.Sequential(attention), found.append):
        attention(torch.randn(1, 5, 6, 8))
    (block,) = found
    _, wide = block.calls
    real = wide.queries[-1] >= 0
    assert real.sum() == 6 and len(real) == 12
    k, v = wide.given['k'][-1, real].relu(), wide.given['v'][-1, real]
    state = wide.state(len(wide.queries) - 1)[0]
    torch.testing.assert_close(state / state.norm(), (k.mT @ v) / (k.mT @ v).norm())


def test_gates_of_patches_beside_a_class_token():
    """What enters the output projection, token by token; the class token is no feature of the map."""
    arch = dict(embed_dims=(32,), depths=(1,), num_heads=(2,), stage_attns=('rala',))
    model, found, outs = LinearDeiT(arch).eval(), [], []
    (attention,) = arrangements(model).values()
    attention.register_forward_hook(lambda module, args, out: outs.append(out[0]))
    with watched(model, lambda block: found.append((block.size, block.features()))):
        model(torch.randn(1, 3, 64, 96))
    ((size, ((_, whole),)),) = found
    assert size == (4, 6) and len(outs[0]) == 1 + 24
    torch.testing.assert_close(attention.proj(whole.transpose(0, 1).flatten(1)), outs[0][1:], rtol=1e-4, atol=1e-5)


def test_inputs_by_their_name():
    attention, found = WindowAttention(8, 2, 'softmax', (2, 2)).eval(), []
    x = torch.randn(1, 4, 6, 8)
    with watched(nn.Sequential(attention), found.append):
        attention(x=x)
    assert found[0].size == (4, 6) and found[0].x is x
