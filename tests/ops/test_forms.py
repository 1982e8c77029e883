# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Which form of an op runs, and that whatever transforms, watches or records a model gets one that stands it."""

import copy
import importlib
import importlib.util
import itertools
import re
import threading
import warnings
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from mmlinattn import ops
from mmlinattn.attention import TOKEN_MIXERS, Attention, Grid, TokenMixer
from mmlinattn.layers import MLP, Block, ConvStem, rotary_table
from mmlinattn.ops import forms
from mmlinattn.ops.linear import cpu as linear_cpu
from mmlinattn.ops.rala import reference

pytestmark = pytest.mark.usefixtures('fast_forms')
DIM, HEADS, GRID = 16, 2, Grid(3, 4)
MIXERS = sorted(name for name in TOKEN_MIXERS.module_dict if name.isidentifier())
every_mixer = pytest.mark.parametrize('mixer', MIXERS)


def build(mixer, dtype=torch.float64, **options):
    module = TOKEN_MIXERS.get(mixer)
    grid = GRID[:2] if module.position_table else None
    attention = Attention(DIM, HEADS, mixer, grid=grid, local_kernel=5, **options).to(dtype)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.4)
    return attention


def tokens(dtype=torch.float64, batch=2):
    return torch.randn(batch, GRID.num_tokens, DIM, dtype=dtype)


def table(dtype=torch.float64):
    return rotary_table(*GRID[:2], DIM // HEADS, dtype=dtype)


def picked(*tensors):
    return forms.pick(reference, *tensors).__name__.rpartition('.')[2]


def test_the_form_is_that_of_the_device_unless_another_is_asked_for():
    x = torch.zeros(2)
    assert picked(x) == 'cpu' == picked(nn.Parameter(x))
    with ops.use('reference'):
        assert picked(x) == 'reference'
        with ops.use('auto'):
            assert picked(x) == 'cpu'
        assert picked(x) == 'reference'
    assert picked(x) == 'cpu'
    with pytest.raises(ValueError, match=r"form='fast' has to be one of \('auto', 'reference'\)"):
        with ops.use('fast'):
            pass


def test_an_error_inside_the_context_gives_the_form_back():
    with pytest.raises(KeyError), ops.use('reference'):
        raise KeyError
    assert picked(torch.zeros(2)) == 'cpu'


def test_the_form_holds_for_all_threads():
    """The backward pass of checkpointed blocks runs in threads of its own."""
    found = []
    with ops.use('reference'):
        thread = threading.Thread(target=lambda: found.append(picked(torch.zeros(2))))
        thread.start()
        thread.join()
    assert found == ['reference']


FORMS = [
    ('cpu', True, 'rala', 'cpu'),
    ('cpu', True, 'depthwise', 'cpu'),  # which has one for any device, too
    ('cpu', True, 'rotary', 'eager'),
    ('cpu', True, 'hydra_attention', 'reference'),
    ('cuda', True, 'rala', 'triton'),
    ('cuda', True, 'depthwise', 'triton'),
    ('cuda', True, 'projection', 'eager'),
    ('cuda', True, 'softmax_attention', 'reference'),
    ('cuda', False, 'rala', 'reference'),
    ('cuda', False, 'depthwise', 'eager'),
    ('xpu', True, 'rala', 'reference'),
    ('xpu', True, 'depthwise', 'eager'),
]


@pytest.mark.parametrize(('device', 'kernels', 'op', 'form'), FORMS)
def test_each_device_gets_the_first_form_that_there_is(device, kernels, op, form, monkeypatch):
    """The first tensor says which device; ``kernels``: whether Triton serves the GPU."""
    if form == 'triton':
        pytest.importorskip('triton')
    asked = []
    monkeypatch.setattr(forms, 'is_plain', lambda *tensors: False)
    monkeypatch.setattr(forms, '_has_triton', lambda gpu: asked.append(gpu) or kernels)
    first, second = (SimpleNamespace(device=torch.device(*place)) for place in ((device, 1), ('cpu',)))
    module = forms.pick(importlib.import_module(f'mmlinattn.ops.{op}.reference'), first, None, second)
    assert module.__name__ == f'mmlinattn.ops.{op}.{form}'
    assert asked == ([torch.device('cuda', 1)] if device == 'cuda' else [])


@pytest.mark.parametrize('value, form', [('reference', 'reference'), ('', 'cpu'), ('auto', 'cpu'), ('Reference', None)])
def test_the_environment_says_which_form_runs(value, form, monkeypatch):
    """It is read once, at import: here by a second copy of the module."""
    monkeypatch.setenv('MMLINATTN_OPS', value)
    spec = importlib.util.spec_from_file_location('mmlinattn.ops.forms_again', forms.__file__)
    again = importlib.util.module_from_spec(spec)
    if form is None:
        with pytest.raises(ValueError, match="MMLINATTN_OPS='Reference' has to be one of"):
            spec.loader.exec_module(again)
    else:
        spec.loader.exec_module(again)
        assert again.pick(reference, torch.zeros(2)).__name__.endswith(f'.rala.{form}')


def test_what_only_stands_for_a_tensor_gets_the_reference():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    x = torch.zeros(2)
    seen = [picked(x.to('meta')), picked(x.as_subclass(Subclass)), picked(x, None, x.to('meta'))]
    with Watching():
        seen.append(picked(x))
    with forward_ad.dual_level():
        seen.append(picked(x))
    vmap(lambda row: seen.append(picked(x)) or row)(torch.zeros(3))
    torch.jit.trace(lambda row: seen.append(picked(x)) or row + 1, x, check_trace=False)
    assert seen == ['reference'] * 7
    assert picked(x) == 'cpu'


# --- transforms and derivatives of derivatives ------------------------------------------------------------------------


@every_mixer
def test_transforms_of_functions(mixer):
    attention, x = build(mixer), tokens()
    options = dict(rotary=table())
    direction = torch.randn_like(x)

    def loss(x):
        return attention(x, GRID, **options).square().sum()

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(grad(loss)(x), expected)
    along = (expected * direction).sum()
    torch.testing.assert_close(jvp(loss, (x,), (direction,))[1], along)
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(x, direction))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)
    each = vmap(lambda item: attention(item[None], GRID, **options)[0])(x)
    torch.testing.assert_close(each, attention(x, GRID, **options))
    parameters = dict(attention.named_parameters())
    gradients = grad(lambda p: functional_call(attention, p, (x, GRID), options).sum())(parameters)
    attention(x, GRID, **options).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad)


@every_mixer
def test_gradients_of_gradients(mixer):
    attention, x = build(mixer), tokens(batch=1).requires_grad_()
    leaves = [x, *attention.parameters()]
    results = []
    for form in ('auto', 'reference'):
        # PyTorch's own fused attention has no second derivatives
        with ops.use(form), sdpa_kernel([SDPBackend.FLASH_ATTENTION] * (form == 'auto') + [SDPBackend.MATH]):
            out = attention(x, GRID, rotary=table())
            first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True))
    assert sum(g is not None and g.abs().max() > 1e-3 for g in results[1]) >= 2
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


DEPTHWISE = dict(x=(2, 4, 6, 5), weight=(4, 1, 5, 5), bias=(4,))
TOKENS = dict(q=(2, 6, 8), k=(2, 6, 8), v=(2, 6, 8))
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
SECOND = {
    'rala': (
        lambda q, k, v: ops.rala(q, k, v * MASK[..., None], 2, 'softmax', mask=MASK, weight_scale=0.5, eps=0.5),
        TOKENS,
    ),
    # of a table that learns, too
    'rala with a rotary table': (lambda q, k, v, r: ops.rala(q, k, v, 2, rotary=r), dict(TOKENS, rotary=(6, 2, 2))),
    'inline': (lambda q, k, v: ops.inline_attention(q, k, v * MASK[..., None], 2, 0.3, 'exp', MASK), TOKENS),
    'focused': (
        lambda q, k, v, scale, offset: ops.focused_attention(
            q, k, v * MASK[..., None], 2, scale.abs() + 0.5, 2.5, offset, MASK, eps=0.1
        ),
        dict(TOKENS, scale=(8,), offset=(1, 6, 8)),
    ),
    'softmax': (lambda q, k, v: ops.softmax_attention(q, k, v, 2, mask=MASK), TOKENS),
    'linear': (ops.linear, dict(x=(3, 5), weight=(4, 5), bias=(4,))),
    'strided conv of gelu': (
        lambda x, w, b: ops.conv_of_gelu(x, w, b, 2, 2),
        dict(x=(2, 4, 6, 5), weight=(6, 2, 3, 3), bias=(6,)),
    ),
    'residual conv of gelu': (lambda x, w, b: ops.conv_of_gelu(x, w, b, 1, 4, True), DEPTHWISE),
    'depthwise': (ops.depthwise_conv2d, DEPTHWISE),
}


@pytest.mark.parametrize(
    ('name', 'frozen'), [(name, i) for name, (_, shapes) in SECOND.items() for i in range(len(shapes))]
)
def test_gradients_of_gradients_where_one_input_has_none(name, frozen, monkeypatch):
    """Of each input that is left, those of the plain form."""
    function, shapes = SECOND[name]
    monkeypatch.setattr(linear_cpu, '_MIN_TRAINED_MACS', 1)
    dtype = torch.float32 if name == 'linear' else torch.float64
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes.values()]
    wanted = [tensor.requires_grad_() for i, tensor in enumerate(tensors) if i != frozen]
    results = []
    for form in ('auto', 'reference'):
        with ops.use(form), sdpa_kernel([SDPBackend.FLASH_ATTENTION] * (form == 'auto') + [SDPBackend.MATH]):
            first = torch.autograd.grad(function(*tensors).sin().sum(), wanted, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
            results.append([*first, *second])
    assert all(g.abs().max() > 1e-6 for g in results[1])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 if name == 'linear' else 1e-8)


@pytest.mark.parametrize('name', SECOND)
def test_gradients_of_some_inputs_alone(name, monkeypatch):
    """As where some layers are frozen, or the bias alone learns: those of the plain form, of whichever there are.
    Only inference writes over its inputs."""
    function, shapes = SECOND[name]
    monkeypatch.setattr(linear_cpu, '_MIN_TRAINED_MACS', 1)
    dtype = torch.float32 if name == 'linear' else torch.float64
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes.values()]

    def gradients(learning):
        leaves = [tensor.clone().requires_grad_(i in learning) for i, tensor in enumerate(tensors)]
        found = torch.autograd.grad(function(*leaves).sin().sum(), [leaves[i] for i in learning])
        assert all(map(torch.equal, leaves, tensors))
        return found

    places = range(len(tensors))
    with ops.use('reference'):
        expected = gradients(places)
    for count in range(1, len(tensors) + 1):
        for learning in itertools.combinations(places, count):
            theirs = [expected[i] for i in learning]
            torch.testing.assert_close(list(gradients(learning)), theirs, rtol=1e-4, atol=1e-5)


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('mixer', 'dynamic', 'backend'),
    [
        *((mixer, False, 'aot_eager') for mixer in MIXERS),
        *((mixer, True, 'eager') for mixer in MIXERS),
        # graphs of the backward pass at open sizes take seconds
        *(pytest.param(mixer, True, 'aot_eager', marks=pytest.mark.slow) for mixer in ('rala', 'focused')),
    ],
)
def test_a_training_step_compiles(mixer, dynamic, backend):
    torch._dynamo.reset()
    attention = build(mixer, torch.float32)
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    grids = [GRID, Grid(5, 4)] if dynamic else [GRID]
    for grid in grids:
        x = torch.randn(2, grid.num_tokens, DIM)
        rotary = rotary_table(*grid[:2], DIM // HEADS)
        results = []
        for module in (attention, compiled):
            leaf = x.clone().requires_grad_()
            attention.zero_grad()
            out = module(leaf, grid, rotary=rotary)
            out.square().mean().backward()
            results.append([out.detach(), leaf.grad, *(p.grad for p in attention.parameters())])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def compiled_nodes(function, *inputs):
    """(operator, float result of it) of the graph that ``torch.compile`` hands to its code generator."""
    nodes = []

    def keep(graph, _):
        nodes.extend((str(node.target), node.meta['val']) for node in graph.graph.nodes if node.op == 'call_function')
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    first = [(op, value[0] if isinstance(value, (tuple, list)) else value) for op, value in nodes]
    return [(op, value) for op, value in first if value.is_floating_point()]


@pytest.mark.parametrize('masked', [False, True], ids=['', 'masked'])
@pytest.mark.parametrize('op', ['rala', 'linear_attention', 'inline_attention', 'efficient_attention', 'angular'])
def test_compiled_heads_are_no_axis_of_channels_last_maps(op, masked):
    """Code that Inductor makes for sums in that order writes past their end (pytorch/pytorch#196681)."""
    options = dict(
        rala=dict(num_heads=HEADS, kernel='softmax', rotary=table(torch.float32)),
        linear_attention=dict(num_heads=HEADS, kernel='elu'),
        inline_attention=dict(num_heads=HEADS, scale=1.0, kernel='softmax'),
        efficient_attention=dict(num_heads=HEADS),
        angular=dict(num_heads=HEADS, released=False),
    )[op]
    function = getattr(ops, 'angular_attention' if op == 'angular' else op)
    mask = torch.arange(GRID.num_tokens).expand(2, -1) < 9 if masked else None
    inputs = [tokens(torch.float32) for _ in range(3)]
    nodes = compiled_nodes(lambda q, k, v: function(q, k, v, mask=mask, **options), *inputs)
    assert [op for op, value in nodes if 'bmm' in op]
    assert [op for op, value in nodes if value.dim() == 4 and value.shape[1] == HEADS] == []


def test_compiled_softmax_attention_is_fused():
    """The map of all pairs is in no graph; Dynamo answers for itself when asked whether torch.func is at work."""
    inputs = [tokens(torch.float32) for _ in range(3)]
    nodes = compiled_nodes(lambda q, k, v: ops.softmax_attention(q, k, v, HEADS), *inputs)
    assert [op for op, _ in nodes if 'scaled_dot_product' in op]
    assert not [op for op, value in nodes if value.shape[-2:] == (GRID.num_tokens,) * 2]


@pytest.mark.slow
def test_a_training_step_compiles_with_inductor():
    torch._dynamo.reset()
    attention, x = build('rala', torch.float32), tokens(torch.float32)
    results = []
    for module in (attention, torch.compile(attention, fullgraph=True)):
        attention.zero_grad()
        out = module(x, GRID, rotary=table(torch.float32))
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in attention.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@every_mixer
def test_traced_graphs_write_over_nothing(mixer):
    attention = build(mixer, torch.float32).eval()
    with torch.no_grad():
        attention.requires_grad_(False)
        traced = torch.jit.trace(lambda x: attention(x, GRID, rotary=table(torch.float32)), tokens(torch.float32))
    names = {node.kind() for node in traced.graph.nodes()}
    assert not [name for name in names if name.endswith('_') and not name.endswith('__')]


# --- hooks, adapters, parametrised weights ----------------------------------------------------------------------------


@pytest.mark.parametrize('layer', ['qkv', 'proj'])
@pytest.mark.parametrize('mixer', ['rala', 'softmax'])
def test_forward_hooks_run_in_training_and_inference(mixer, layer):
    attention, x, calls = build(mixer), tokens(), []
    module = getattr(attention, layer)
    expected = attention(x, GRID)
    handle = module.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(attention(x, GRID), expected)
    with torch.no_grad():
        torch.testing.assert_close(attention(x, GRID), expected)
    handle.remove()
    module.register_forward_pre_hook(lambda *args: calls.append(1))
    attention(x, GRID)
    assert len(calls) == 3


@pytest.mark.parametrize('layer', ['qkv', 'proj'])
@pytest.mark.parametrize('kind', ['register_full_backward_hook', 'register_full_backward_pre_hook'])
def test_backward_hooks_run(kind, layer):
    """Who shards or watches gradients hangs on the layer, whose weight would otherwise be used without it."""
    attention, calls = build('rala'), []
    getattr(getattr(attention, layer), kind)(lambda *args: calls.append(1))
    attention(tokens(), GRID).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize('reduced', [False, True], ids=['', 'reduced keys'])
@pytest.mark.parametrize('change', [weight_norm, parametrizations.weight_norm, 'prune', 'forward'])
def test_changed_weights_train(change, reduced):
    """Two steps: what is taken out of the layer has to be made anew for the second."""
    attention, x = build('softmax'), tokens()
    attention.local = None
    if change == 'prune':
        prune.l1_unstructured(attention.qkv, 'weight', amount=0.5)
    elif change == 'forward':
        original = attention.qkv.forward
        attention.qkv.forward = lambda x: 2 * original(x)
    else:
        change(attention.qkv)
    options = dict(kv=x[:, ::2], key_grid=Grid(2, 3)) if reduced else {}
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    outs = []
    for _ in range(2):
        optimizer.zero_grad()
        out = attention(x, GRID, **options)
        out.square().mean().backward()
        optimizer.step()
        outs.append(out.detach())
    assert (outs[0] - outs[1]).abs().max() > 1e-6


@pytest.mark.parametrize('bound', [False, True], ids=['function', 'method'])
@pytest.mark.parametrize('layer', ['qkv', 'proj'])
@pytest.mark.parametrize('mixer', ['rala', 'softmax'])
def test_a_forward_of_an_instance_is_called(mixer, layer, bound):
    """Adapters and quantisers put one in place of the class's, a function or a method of the layer; here it doubles
    what comes out."""
    attention, x = build(mixer), tokens()
    twin = copy.deepcopy(attention)
    for parameter in getattr(twin, layer).parameters():
        parameter.data *= 2
    module = getattr(attention, layer)
    original = module.forward
    doubled = MethodType(lambda self, x: 2 * original(x), module)
    module.forward = doubled if bound else lambda x: 2 * original(x)
    torch.testing.assert_close(attention(x, GRID), twin(x, GRID))
    with torch.no_grad():
        torch.testing.assert_close(attention(x, GRID), twin(x, GRID))


def test_what_a_hook_has_seen_stays_as_it_was():
    """In inference results are written over; not those that somebody keeps."""
    attention = Attention(DIM, HEADS, 'rala', local_kernel=5)
    block = Block(DIM, attention, MLP(DIM, 32), dict(type='LN'))
    seen = {}
    for name, module in block.named_modules():
        module.register_forward_hook(lambda m, i, out, name=name: seen.setdefault(name, []).append((out, out.clone())))
    with torch.no_grad():
        block(tokens(torch.float32), grid=GRID)
    assert len(seen) > 6
    for name, pairs in seen.items():
        for kept, copied in pairs:
            assert torch.equal(kept, copied), name


@pytest.mark.parametrize('training', [False, True])
def test_hooks_of_all_modules_run(training):
    """Profilers and feature extractors hang one on everything at once."""
    seen = []
    block = Block(DIM, Attention(DIM, HEADS, 'rala', local_kernel=5), MLP(DIM, 32), dict(type='LN')).train(training)
    stem, x, image = ConvStem(3, 8, dict(type='BN')).eval(), tokens(torch.float32), torch.randn(1, 16, 16, 3)
    with torch.set_grad_enabled(training):
        expected = block(x, grid=GRID), stem(image)
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
        try:
            found = block(x, grid=GRID), stem(image)
        finally:
            handle.remove()
    torch.testing.assert_close(found, expected)
    assert [seen.count(kind) for kind in (nn.Linear, nn.Conv2d, nn.BatchNorm2d)] == [4, 4, 4]


@pytest.mark.parametrize('gate', ['identity', 'projection', None])
def test_a_mixer_may_return_a_view_of_shared_memory(gate):
    @TOKEN_MIXERS.register_module('expanded mean', force=True)
    class Mean(TokenMixer):
        def forward(self, q, k, v, grid, key_grid, **_):
            return v.mean(dim=1, keepdim=True).expand_as(v)

    try:
        attention, x = build('expanded mean', gate=gate), tokens()
        for local in (attention.local, None):
            attention.local = local
            expected = attention(x, GRID)
            with torch.no_grad():
                torch.testing.assert_close(attention(x, GRID), expected)
    finally:
        TOKEN_MIXERS._module_dict.pop('expanded mean')


@pytest.mark.parametrize(
    ('capability', 'triton', 'cuda', 'reason'),
    [
        ((8, 0), True, '12.4', None),
        ((9, 0), True, '12.4', None),
        ((7, 5), True, '12.4', 'T4 is older than the kernels (compute capability 8.0)'),
        ((9, 0), True, None, 'T4 is older'),  # ROCm
        ((9, 0), False, '12.4', 'Triton is not installed'),
    ],
)
def test_which_gpus_get_kernels(monkeypatch, capability, triton, cuda, reason):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: triton or None)
    monkeypatch.setattr(torch.version, 'cuda', cuda)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'T4')
    has_triton = forms._has_triton.__wrapped__
    if reason is None:
        assert has_triton(torch.device('cuda', 0))
        return
    with pytest.warns(UserWarning, match='no GPU kernels, plain PyTorch in their place: ' + re.escape(reason)):
        assert not has_triton(torch.device('cuda', 0))


def test_missing_kernels_are_told_once_for_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    forms._has_triton.cache_clear()
    try:
        with pytest.warns(UserWarning, match='Triton is not installed'):
            assert not forms._has_triton(torch.device('cuda', 0))
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert not forms._has_triton(torch.device('cuda', 0))
    finally:
        forms._has_triton.cache_clear()


class SaysWhetherItIsTraced(nn.Module):
    def forward(self, x):
        return x + 1 if forms.is_traced() else x


class SaysWhetherItIsExported(nn.Module):
    def forward(self, x):
        return x + 1 if forms.is_exported() else x


def test_only_what_runs_python_code_is_told_of_an_export():
    """The tracers of ``torch.compile`` and of the strict export read it instead."""
    model, x = SaysWhetherItIsExported(), torch.zeros(3)
    told = {strict: torch.export.export(model, (x,), strict=strict).module()(x).all() for strict in (False, True)}
    assert told == {False: True, True: False}
    assert not model(x).any() and not torch.compile(model, backend='eager')(x).any()
    assert not torch.jit.trace(model, x)(x).any()


@pytest.mark.parametrize('strict', [False, True])
def test_graphs_of_every_kind_are_told(strict):
    model, x = SaysWhetherItIsTraced(), torch.zeros(3)
    assert not model(x).any()
    assert torch.export.export(model, (x,), strict=strict).module()(x).all()
    assert torch.jit.trace(model, x)(x).all()
    assert torch.compile(model, backend='eager')(x).all()
