# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused forms on CPUs without gradients leave alone what somebody changed or watches."""

from unittest import mock

import pytest
import small_hosts
import torch
from mmcv.cnn.bricks import DropPath
from small_hosts import ARCHS
from torch import nn
from torch.overrides import TorchFunctionMode
from twins import DIM, HEADS, filled

from mmlinattn.attention import GlobalAttention, StageContext
from mmlinattn.backbones import RAVLT
from mmlinattn.inference import CPUForward
from mmlinattn.layers import MLP, Block, ConvFFN, DWConvFFN

ROOM = CPUForward(torch.float64, torch.float64)
LN = dict(type='LN', eps=1e-6)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, out: 2 * out)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def adapted(layer):
    layer.__class__ = Doubled


@pytest.mark.parametrize('change', [hooked, adapted])
@pytest.mark.parametrize('place', ['qkv', 'proj', 'fc1', 'fc2'])
def test_what_somebody_changed_or_watches_is_called(place, change):
    """The rest of its block keeps its fused form. All layers at once: tests/backbones/test_pairs.py."""
    block = filled(Block(DIM, GlobalAttention(DIM, HEADS, 'rala'), MLP(DIM, 40), LN)).eval()
    part = block.attn if place in ('qkv', 'proj') else block.ffn
    x = torch.randn(2, 3, 5, DIM, dtype=torch.float64)
    before = block(x, StageContext.of(x))
    change(getattr(part, place))
    expected = block(x, StageContext.of(x))
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(ROOM.call(block, x, StageContext.of(x)), expected)
    assert ROOM.form(part) is None
    assert all(ROOM.form(other) is not None for other in (block, block.attn, block.ffn) if other is not part)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def of_block(name):
    """Something else in place of a part of the first block."""

    def put(make):
        def change(model):
            owner, _, part = f'stages.0.0.{name}'.rpartition('.')
            owner = model.get_submodule(owner)
            setattr(owner, part, make(getattr(owner, part)))

        return change

    return put


def twice(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def recalibrated(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train().momentum = 0.0


def without_first_token(model):
    model.stages[0][0].norm1.register_forward_hook(
        lambda module, args, out: out * (torch.arange(len(out[0])) > 0)[:, None]
    )


def plain_stem(model):
    old = model.patch_embeds[0].layers[2]
    new = nn.Conv2d(old.in_channels, old.out_channels, 3, 1, 1)
    new.load_state_dict(old.state_dict())
    model.patch_embeds[0].layers[2] = new.double()


class Tagged(torch.Tensor):
    """As quantised weights are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, *bias = (t.as_subclass(torch.Tensor) if isinstance(t, Tagged) else t for t in args)
        return nn.functional.linear(x, 2 * weight, *bias)


def tagged(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged), requires_grad=False)
    return layer


def padded_in_a_circle(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.padding_mode = 'circular'
            module._reversed_padding_repeated_twice = [1] * 4


def with_spans(**spans):
    def change(model):
        for name, span in spans.items():
            setattr(model.patch_embeds[0].layers[2], name, span)

    return change


def dense(conv):
    """The same convolution, not depth-wise."""
    new = nn.Conv2d(len(conv.weight), len(conv.weight), 3, padding=1)
    conv.groups, conv.weight, conv.bias = 1, new.double().weight, None
    return conv


CHANGES = {
    'circular padding': padded_in_a_circle,
    'no padding': with_spans(padding=(0, 0)),
    'strides of two lengths': with_spans(stride=(2, 1)),
    'holes': with_spans(dilation=(2, 2), padding=(2, 2)),
    'a dense position encoding': of_block('position')(dense),
    'batch norms that train': recalibrated,
    'a hook on tokens': without_first_token,
    'a norm over tokens': of_block('norm2')(lambda norm: Centred()),
    'a stem without GELU': plain_stem,
    'one more layer of the stem': lambda model: model.patch_embeds[0].layers.append(nn.Hardtanh()),
    'a norm of down-sampling': lambda model: model.patch_embeds[1].layers.append(filled(nn.BatchNorm2d(16)).eval()),
    'low rank': of_block('attn.qkv')(lambda old: nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 32)).double()),
    'no convolution of values': of_block('attn.local')(lambda conv: nn.Identity()),
    'a norm of values': of_block('attn.local')(lambda conv: nn.Sequential(conv, filled(nn.BatchNorm2d(8))).eval()),
    'no convolution': of_block('ffn.dwconv')(lambda conv: nn.Identity()),
    'weights of another type': of_block('ffn.fc1')(tagged),
    'a mixer without rotation': lambda model: setattr(model.stages[0][0].attn.mixer, 'rotary', False),
    'its own mix': of_block('attn.mix')(twice),
    'its own attend': of_block('attend')(twice),
    'its own hidden': of_block('ffn.hidden')(twice),
}


@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
def test_what_acts_with_gradients_acts_without(change):
    model, x = filled(RAVLT(ARCHS['RAVLT'])).eval(), torch.rand(2, 3, 70, 52, dtype=torch.float64)
    before = model(x)
    change(model)
    with torch.enable_grad():
        expected = model(x)
    assert any(a.shape != b.shape or (a - b).abs().max() > 1e-3 for a, b in zip(before, expected))
    torch.testing.assert_close(model(x), expected)


def test_convolutions_of_pvt_may_be_something_else():
    module, x = filled(DWConvFFN(DIM, 40)).eval(), torch.randn(2, 9, 12, DIM, dtype=torch.float64)
    module.dwconv = nn.Identity()
    torch.testing.assert_close(ROOM.call(module, x), module(x))


METHODS = [
    (nn.Linear, 'forward'),
    *((nn.Module, name) for name in ('__call__', '_call_impl')),
    # that a class only inherits
    *((ConvFFN, 'forward'), (GlobalAttention, 'mix'), (nn.Linear, '__call__')),
]


@pytest.mark.parametrize(('kind', 'name'), METHODS)
def test_methods_that_somebody_replaced(monkeypatch, kind, name):
    """For all modules of a class, as tools that quantise or count do."""
    model, x = filled(RAVLT(ARCHS['RAVLT'])).eval(), torch.rand(1, 3, 64, 64, dtype=torch.float64)
    inherited, calls = getattr(kind, name), []
    monkeypatch.setattr(
        kind, name, lambda self, *args, **kwargs: calls.append(self) or inherited(self, *args, **kwargs)
    )
    model(x)
    count = len(calls)
    with torch.enable_grad():
        model(x)
    assert count > 0 and len(calls) == 2 * count


def test_dropped_paths_in_eval_mode():
    """Monte Carlo dropout: ``block.drop_path.train()``."""
    model, x = filled(RAVLT(ARCHS['RAVLT'], drop_path_rate=0.5)).eval(), torch.rand(4, 3, 64, 64, dtype=torch.float64)
    before = model(x)
    for module in model.modules():
        if isinstance(module, DropPath):
            module.train()
    outs = []
    for learns in (True, False):
        torch.manual_seed(0)
        with torch.set_grad_enabled(learns):
            outs.append(model(x))
    assert (outs[0][3] - before[3]).abs().max() > 1e-3
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize('host', sorted(ARCHS))
def test_replicas_of_data_parallel(host):
    """Their weights are plain attributes, and no parameters."""
    model, x = filled(small_hosts.build(host, 'rala')).eval(), torch.rand(2, 3, 64, 64, dtype=torch.float64)
    expected = model(x)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                delattr(module, name)
                setattr(module, name, weight.detach())
    torch.testing.assert_close(model(x), expected)


linear = nn.functional.linear


def half_linear(*args):
    return linear(*args) / 2


class Halved(TorchFunctionMode):
    """As modes that quantise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is linear else out


@pytest.mark.parametrize('change', [Halved, lambda: mock.patch.object(nn.functional, 'linear', half_linear)])
def test_functions_that_somebody_replaced(change):
    """In float32, which has operators of its own."""
    model, x = filled(RAVLT(ARCHS['RAVLT'])).float().eval(), torch.rand(1, 3, 64, 64)
    before = model(x)
    with change():
        with torch.enable_grad():
            expected = model(x)
        assert (expected[0] - before[0]).abs().max() > 1e-3
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)


def test_a_device_as_a_context_replaces_nothing(monkeypatch):
    called = []
    monkeypatch.setattr(CPUForward, 'call', lambda self, module, *args: called.append(module) or module(*args))
    with torch.device('cpu'):
        RAVLT(ARCHS['RAVLT']).eval()(torch.rand(1, 3, 64, 64))
    assert called


BIASES = {
    'strided': lambda bias: torch.stack((bias, bias + 9), 1)[:, 0],
    'expanded': lambda bias: bias[:1].expand_as(bias),
    'broadcast': lambda bias: bias[:1],
}


@pytest.mark.parametrize('is_buffer', [False, True])
@pytest.mark.parametrize('change', BIASES.values(), ids=BIASES)
@pytest.mark.parametrize('host', ['RAVLT', 'LinearPVTv2'])
def test_biases_of_other_strides_and_sizes(host, change, is_buffer):
    """In float32, of which oneDNN's operators would read something else."""
    model, x = filled(small_hosts.build(host, 'inline')).float().eval(), torch.rand(2, 3, 70, 52)
    for layer in model.modules():
        if isinstance(layer, nn.Linear if change is BIASES['broadcast'] else (nn.Linear, nn.Conv2d)):
            bias = None if layer.bias is None else change(layer.bias.detach())
            if is_buffer:
                del layer.bias
                layer.register_buffer('bias', bias)
            else:
                layer.bias = None if bias is None else nn.Parameter(bias)
    with torch.enable_grad():
        expected = model(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
