# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Choice of the backend of an op, and safe backends under transforms, hooks and recorders."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.attentions import LINEAR
from helpers.references import DIM, HEADS, attend, build
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from mmlinattn import ops
from mmlinattn.attention import TOKEN_MIXERS, Grid, StageContext
from mmlinattn.layers import rotary_table
from mmlinattn.ops import dispatch

pytestmark = pytest.mark.usefixtures('fast_forms')
GRID = Grid(3, 4)
MIXERS = sorted(name for name in TOKEN_MIXERS.module_dict if name.isidentifier())


def tokens():
    return torch.randn(2, GRID.num_tokens, DIM)


def build_local(mixer):
    return build(mixer, grid=GRID[:2], local_kernel=5)


def chosen(*tensors, module=dispatch):
    if module.needs_reference(*tensors):
        return 'reference'
    return 'cpu' if module.on_cpu(tensors[0]) else 'eager'


def test_the_backend_is_that_of_the_device_unless_another_is_asked_for():
    x = torch.zeros(2)
    assert chosen(x) == 'cpu' == chosen(nn.Parameter(x))
    with dispatch.as_on_gpu():
        assert chosen(x) == 'eager'
    with ops.use('reference'):
        assert chosen(x) == 'reference'
        # checkpointed blocks run backward in threads of their own
        assert ThreadPoolExecutor(1).submit(chosen, x).result() == 'reference'
        with ops.use('auto'):
            assert chosen(x) == 'cpu'
        assert chosen(x) == 'reference'
    assert chosen(x) == 'cpu'
    with pytest.raises(ValueError, match=r"backend='fast': expected one of \('auto', 'reference'\)"), ops.use('fast'):
        pass
    with pytest.raises(ValueError, match='triton.*--compile'), ops.use('triton'):
        pass
    with pytest.raises(KeyError), ops.use('reference'):
        raise KeyError
    assert chosen(x) == 'cpu'


@pytest.mark.parametrize('value', ['reference', '', 'auto', 'eager', 'triton'])
def test_backend_of_the_environment(value, monkeypatch):
    """Read the variable at import, here by a second copy of the module."""
    monkeypatch.setenv('MMLINATTN_OPS', value)
    spec = importlib.util.spec_from_file_location('mmlinattn.ops.dispatch_again', dispatch.__file__)
    again = importlib.util.module_from_spec(spec)
    if value in ('eager', 'triton'):
        with pytest.raises(ValueError, match=f'MMLINATTN_OPS={value!r}: '):
            spec.loader.exec_module(again)
    else:
        spec.loader.exec_module(again)
        assert chosen(torch.zeros(2), module=again) == ('reference' if value == 'reference' else 'cpu')


def test_tensor_subclasses_get_the_reference():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    x = torch.zeros(2)
    stand_ins = [(x.to('meta'),), (x.as_subclass(Subclass),), (x, None, x.to('meta'))]
    seen = [chosen(*tensors) for tensors in stand_ins]
    with Watching():
        seen.append(chosen(x))
    with forward_ad.dual_level():
        seen.append(chosen(x))
    vmap(lambda row: seen.append(chosen(x)) or row)(torch.zeros(3))
    torch.jit.trace(lambda row: seen.append(chosen(x)) or row + 1, x, check_trace=False)
    assert seen == ['reference'] * 7
    assert chosen(x) == 'cpu'


@pytest.mark.parametrize('mixer', MIXERS)
def test_transforms_of_functions(mixer):
    attention, x = build_local(mixer), tokens().double()
    rotary = rotary_table(*GRID[:2], DIM // HEADS, dtype=x.dtype)
    options = dict(rotary=rotary, bias=torch.randn(1, attention.mixer.num_heads, *[x.shape[1]] * 2, dtype=x.dtype))
    direction = torch.randn_like(x)

    def loss(x):
        return attend(attention, x, GRID, **options).square().sum()

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    torch.testing.assert_close(grad(loss)(x), expected)
    along = (expected * direction).sum()
    torch.testing.assert_close(jvp(loss, (x,), (direction,))[1], along)
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(x, direction))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)
    each = vmap(lambda item: attend(attention, item[None], GRID, **options)[0])(x)
    torch.testing.assert_close(each, attend(attention, x, GRID, **options))
    parameters = dict(attention.named_parameters())
    stage = StageContext(GRID, options['rotary'])
    gradients = grad(lambda p: functional_call(attention, p, (x, stage)).sum())(parameters)
    attention(x, stage).sum().backward()
    torch.testing.assert_close(gradients, {name: parameter.grad for name, parameter in parameters.items()})


@pytest.mark.parametrize(
    ('mixer', 'dynamic', 'backend'),
    [
        ('rala', False, 'aot_eager'),
        ('inline', True, 'eager'),
        # graphs of the backward pass take seconds
        *(pytest.param(mixer, False, 'aot_eager', marks=pytest.mark.slow) for mixer in MIXERS if mixer != 'rala'),
        *(pytest.param(mixer, True, 'aot_eager', marks=pytest.mark.slow) for mixer in ('rala', 'focused')),
    ],
)
def test_a_training_step_compiles(mixer, dynamic, backend):
    torch._dynamo.reset()
    attention = build_local(mixer).float()
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    grids = [GRID, Grid(5, 4)] if dynamic else [GRID]
    for grid in grids:
        x = torch.randn(2, grid.num_tokens, DIM)
        rotary = rotary_table(*grid[:2], DIM // HEADS)
        results = []
        for module in (attention, compiled):
            leaf = x.clone().requires_grad_()
            attention.zero_grad()
            out = module(leaf, StageContext(grid, rotary))
            out.square().mean().backward()
            results.append([out.detach(), leaf.grad, *(p.grad for p in attention.parameters())])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def compiled_nodes(function, *inputs):
    """Return (operator, floating-point result) of each node that ``torch.compile`` hands to its code generator."""
    nodes = []

    def keep(graph, _):
        nodes.extend((str(node.target), node.meta['val']) for node in graph.graph.nodes if node.op == 'call_function')
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    first = [(op, value[0] if isinstance(value, (tuple, list)) else value) for op, value in nodes]
    return [(op, value) for op, value in first if value.is_floating_point()]


@pytest.mark.parametrize(('name', 'masked'), [(name, name != 'rala') for name in LINEAR if name != 'hydra'])
def test_compiled_heads_are_no_axis_of_channels_last_maps(name, masked):
    """Avoid Inductor's code for sums in that order, which writes out of bounds (pytorch/pytorch#196681)."""
    mask = torch.arange(GRID.num_tokens).expand(2, -1) < 9 if masked else None
    inputs = [tokens() for _ in range(3)]
    nodes = compiled_nodes(partial(LINEAR[name], num_heads=HEADS, mask=mask), *inputs)
    assert [op for op, value in nodes if 'bmm' in op]
    assert [op for op, value in nodes if value.dim() == 4 and value.shape[1] == HEADS] == []


def test_compiled_softmax_attention_is_fused():
    """No graph builds the N x N attention map. Dynamo resolves the check for torch.func at compile time."""
    inputs = [tokens() for _ in range(3)]
    nodes = compiled_nodes(lambda q, k, v: ops.softmax_attention(q, k, v, HEADS), *inputs)
    assert [op for op, _ in nodes if 'scaled_dot_product' in op]
    assert not [op for op, value in nodes if value.shape[-2:] == (GRID.num_tokens,) * 2]


class Asks(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.question = question

    def forward(self, x):
        return x + 1 if self.question() else x


@pytest.mark.parametrize('strict', [False, True])
def test_graphs_are_told_of_their_tracing_and_python_code_of_an_export(strict):
    """Expect that strict export and ``torch.compile`` are not seen as an export."""
    traced, exported, x = Asks(dispatch.is_traced), Asks(dispatch.is_exported), torch.zeros(3)
    assert not traced(x).any() and not exported(x).any()
    assert torch.export.export(traced, (x,), strict=strict).module()(x).all()
    assert torch.export.export(exported, (x,), strict=strict).module()(x).all() == (not strict)
    assert torch.jit.trace(traced, x)(x).all() and not torch.jit.trace(exported, x)(x).any()
    assert torch.compile(traced, backend='eager')(x).all()
    assert not torch.compile(exported, backend='eager')(x).any()
