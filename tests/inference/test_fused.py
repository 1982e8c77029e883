# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fused twins equal their modules; tests/backbones/test_pairs.py compares hosts as a whole."""

import itertools

import pytest
import torch
from helpers import small_hosts
from helpers.twins import ATTENTIONS, DIM, HEADS, filled
from torch import nn

from mmlinattn import ops
from mmlinattn.attention import (
    Attention,
    GlobalAttention,
    Grid,
    ReducedAttention,
    StageContext,
    StripeAttention,
    TokenMixer,
)
from mmlinattn.attention import WindowAttention as Windowed
from mmlinattn.inference import fused, regions
from mmlinattn.inference.fused import Precision, add_in_place, fuse, linear_gelu, product
from mmlinattn.layers import (
    MLP,
    Block,
    ConvDownsample,
    ConvFFN,
    ConvStem,
    DWConvFFN,
    ResidualDWConv,
    SourceBlock,
    compact,
    rotary_table,
)
from mmlinattn.utils import private_apis

DOUBLE = Precision.of(torch.float64)
LN = dict(type='LN', eps=1e-6)
ARRANGEMENTS = {
    'map': lambda spec, **kw: GlobalAttention(DIM, HEADS, spec, grid=(3, 4), **kw),
    'tokens': lambda spec, **kw: Attention(DIM, HEADS, spec, grid=(3, 4), **kw),
    'reduced': lambda spec, **kw: ReducedAttention(DIM, HEADS, spec, 2, LN, grid=(3, 4), **kw),
    'windows': lambda spec, **kw: Windowed(DIM, HEADS, spec, (3, 4), grid=(3, 4), relative_bias=True, **kw),
    'shifted': lambda spec, **kw: Windowed(DIM, HEADS, spec, (3, 4), shift=True, grid=(3, 4), relative_bias=True, **kw),
    'stripes': lambda spec, **kw: StripeAttention(DIM, HEADS, spec, 3, **kw),
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def attention(arrangement, name, **options):
    """None where the arrangement does not take the attention."""
    try:
        return filled(ARRANGEMENTS[arrangement](ATTENTIONS[name], **options)).eval()
    except ValueError:
        return None


@pytest.mark.parametrize('options', [{}, dict(local_kernel=3), dict(gate='projection', local_kernel=5)], ids=str)
@pytest.mark.parametrize('arrangement', ARRANGEMENTS)
@pytest.mark.parametrize('name', ATTENTIONS)
def test_attentions(name, arrangement, options, monkeypatch):
    """With and without another source of the mean token, and windows that pad or do not."""
    if arrangement == 'stripes':
        options = {key: value for key, value in options.items() if key != 'gate'}
    module = attention(arrangement, name, **options)
    if module is None or (arrangement == 'reduced' and (options or not module.mixer.quadratic)):
        return  # those who reduce keys have quadratic attentions without a local term
    size = (7, 9)
    x, source = (torch.randn(2, *size, DIM, dtype=torch.float64) for _ in range(2))
    stage = StageContext.of(x, rotary_table(*size, DIM // HEADS, dtype=torch.float64))
    if arrangement == 'tokens':
        x, source = (torch.randn(2, 64, DIM, dtype=torch.float64) for _ in range(2))
        stage = StageContext(Grid(*size, prefix=1))
    twin = fuse(module, DOUBLE)
    assert twin is not module
    for other, small in itertools.product((None, source), (0, 2**22)):
        monkeypatch.setattr(regions, 'SMALL_NUMEL', small)
        given = x.clone()
        stage = stage._replace(source=other)
        torch.testing.assert_close(twin(given, stage), module(x, stage))
        assert torch.equal(given, x)


def with_conv(ffn, conv):
    ffn.dwconv = conv
    return ffn


FFNS = {
    'mlp': lambda: MLP(DIM, 40),
    'conv': lambda: ConvFFN(DIM, 40),
    'dwconv': lambda: DWConvFFN(DIM, 40),
    'conv 5': lambda: with_conv(ConvFFN(DIM, 40), ResidualDWConv(40, 5, of_gelu=True)),
    'dwconv 5': lambda: with_conv(DWConvFFN(DIM, 40), nn.Conv2d(40, 40, 5, padding=2, groups=40)),
    'compact': lambda: compact(ConvFFN(DIM, 40)),
    'compact M1': lambda: compact(DWConvFFN(DIM, 40), matrix='M1'),
}


@pytest.mark.parametrize('size', [(20, 3), (17, 3), (41, 3)], ids=str)
@pytest.mark.parametrize('name', FFNS)
def test_strips_of_feed_forward_networks_change_nothing(name, size, monkeypatch):
    module = filled(FFNS[name]()).eval()
    x, twin = torch.randn(2, *size, DIM, dtype=torch.float64), fuse(module, DOUBLE)
    assert isinstance(twin, fused.FeedForwardStep)
    for numel in (fused.STRIP_NUMEL, 40 * 8 * size[1]):
        monkeypatch.setattr(fused, 'STRIP_NUMEL', numel)
        torch.testing.assert_close(twin(x), module(x))
        assert twin(x[:0]).shape == (0, *size, DIM)


@pytest.mark.parametrize('kind', [Block, SourceBlock])
@pytest.mark.parametrize('layer_scale', [None, 0.5])
@pytest.mark.parametrize('position', [False, True])
def test_blocks(kind, layer_scale, position):
    attn, conv = GlobalAttention(DIM, HEADS, 'inline'), ResidualDWConv(DIM) if position else None
    block = filled(kind(DIM, attn, ConvFFN(DIM, 40), LN, 0.2, layer_scale, conv)).eval()
    x = torch.randn(2, 3, 5, DIM, dtype=torch.float64)
    given = x.clone()
    torch.testing.assert_close(fuse(block, DOUBLE)(given, StageContext.of(x)), block(x, StageContext.of(x)))
    assert torch.equal(given, x)
    seen = []  # results that a hook keeps are not overwritten
    block.attn.register_forward_hook(lambda module, inputs, out: seen.append((out, out.clone())))
    fuse(block, DOUBLE)(x, StageContext.of(x))
    torch.testing.assert_close(*seen[0])


class Listening(nn.Module):
    def forward(self, x, stage):
        return x - 2 * stage.source


def test_an_attention_of_users_gets_the_source():
    block = filled(SourceBlock(DIM, Listening(), MLP(DIM, 40), LN)).eval()
    x = torch.randn(2, 3, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(fuse(block, DOUBLE)(x, StageContext.of(x)), block(x, StageContext.of(x)))


def test_a_mean_token_of_all_keys():
    module = filled(ReducedAttention(DIM, HEADS, 'inline', 1, LN)).eval()
    x = torch.randn(2, 7, 9, DIM, dtype=torch.float64)
    torch.testing.assert_close(fuse(module, DOUBLE)(x, StageContext.of(x)), module(x, StageContext.of(x)))


def test_autocast_leaves_float64_alone():
    model, x = filled(small_hosts.build('LinearSwin', 'inline')).eval(), torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.autocast('cpu', torch.bfloat16):
        out = model(x)
    torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize('norm', ['BN', 'SyncBN', 'without weights', 'GN'])
@pytest.mark.parametrize('kind', [ConvStem, ConvDownsample])
def test_batch_norms_are_folded(kind, norm, monkeypatch):
    """If weights and statistics define them fully."""
    cfg = dict(type='BN', affine=False) if norm == 'without weights' else dict(type=norm)
    module = kind(4, 8, dict(cfg, num_groups=2) if norm == 'GN' else cfg)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)
    module, x = filled(module).eval(), torch.randn(2, 16, 12, 4, dtype=torch.float64)
    expected = module(x)
    if norm in ('BN', 'SyncBN'):
        monkeypatch.setattr(nn.functional, 'batch_norm', None)
    torch.testing.assert_close(fuse(module, DOUBLE)(x), expected)


@pytest.mark.parametrize(
    'options', [dict(padding='same'), dict(padding_mode='reflect', padding=1), dict(dilation=2, padding=2)], ids=str
)
def test_another_convolution_is_called(options):
    """Its weight alone does not define the result."""
    module = DWConvFFN(DIM, 40)
    module.dwconv = nn.Conv2d(40, 40, 3, groups=40, **options)
    module, x = filled(module).eval(), torch.randn(2, 9, 12, DIM, dtype=torch.float64)
    assert not isinstance(fuse(module, DOUBLE), fused.FeedForwardStep)
    torch.testing.assert_close(fuse(module, DOUBLE)(x), module(x))


@pytest.mark.parametrize('onednn', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_products(dtype, onednn, monkeypatch):
    """By oneDNN's operators or, where PyTorch is built without them, by its own."""
    monkeypatch.setattr(private_apis, 'HAS_ONEDNN', private_apis.HAS_ONEDNN and onednn)
    precision, layer = Precision.of(dtype), nn.Linear(12, 10).to(dtype)
    twin = fuse(layer, precision)
    tolerance = dict(rtol=0.05, atol=0.1) if dtype == torch.bfloat16 else {}
    for x in (torch.randn(3, 11, 12, dtype=dtype), torch.randn(3, 11, 30, dtype=dtype)[..., 6:18]):
        expected = layer(x)
        strided = layer.weight.t().contiguous().t()
        torch.testing.assert_close(product(precision, x, strided, layer.bias), expected, **tolerance)
        torch.testing.assert_close(twin(x), expected, **tolerance)
        torch.testing.assert_close(linear_gelu(twin, x), nn.functional.gelu(expected), **tolerance)
        assert twin(x[:0]).shape == (0, 11, 10)


def test_sums_of_one_type_are_in_place():
    x, half = torch.rand(3), torch.rand(3).bfloat16()
    assert add_in_place(x, torch.ones(3)) is x
    before = half.clone()
    assert add_in_place(half, x).dtype == torch.float32 and torch.equal(half, before)


def test_products_under_autocast_are_of_its_type():
    layer, x = nn.Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    precision = Precision.of(torch.bfloat16)
    twin = fuse(layer, precision)
    with torch.autocast('cpu', torch.bfloat16):
        assert twin(x).dtype == layer(x).dtype == torch.bfloat16
        assert linear_gelu(twin, x).dtype == fuse(stem, precision)(image).dtype == torch.bfloat16
        torch.testing.assert_close(twin(x), layer(x), rtol=0.05, atol=0.05)


# --- twins follow their modules ---------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def write_data(model):
    for parameter in model.parameters():  # as EMA swaps weights
        parameter.data.copy_(parameter.data * 1.1)
    for name, buffer in model.named_buffers():
        if name.endswith('running_var'):
            buffer.data.mul_(1.3)


def train_one_norm(model):
    next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)).train()


CHANGES = {
    'written weights': write_data,
    'another parameter': lambda model: setattr(model.stages[0][0], 'gamma1', nn.Parameter(torch.full((8,), 3.0))),
    'another eps': lambda model: setattr(model.stages[0][0].norm1, 'eps', 0.5),
    'another gate': lambda model: setattr(model.stages[0][0].attn, 'gate', None),
    'another scale': lambda model: setattr(model.stages[0][0].attn.mixer, 'weight_scale', 0.1),
    'another layer': lambda model: setattr(model.stages[1][0].ffn, 'fc1', Doubled(16, 56)),
    'a method': lambda model: setattr(model.stages[1][0].ffn, 'hidden', lambda x: model.stages[1][0].ffn.fc1(x).relu()),
    'a norm that trains': train_one_norm,
}


@pytest.mark.parametrize('change', CHANGES)
def test_twins_follow_their_modules(change):
    model = filled(small_hosts.build('RAVLT', 'rala')).double().eval()
    x = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    before = model(x)
    CHANGES[change](model.double())
    model.double()
    after = model(x)
    with ops.use('reference'):
        expected = model(x)
    assert not torch.allclose(before[-1], after[-1])
    for out, other in zip(after, expected):
        torch.testing.assert_close(out, other)


@pytest.mark.parametrize('kind, name', [(ConvFFN, 'hidden'), (Block, 'add'), (nn.Linear, 'forward')])
def test_methods_of_a_class_that_somebody_replaced_are_called(kind, name, monkeypatch):
    model, x = small_hosts.build('RAVLT', 'rala').eval(), torch.rand(1, 3, 64, 64)
    model(x)
    called, method = [], getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *args: called.append(self) or method(self, *args))
    model(x)
    assert called


class Identity(TokenMixer):
    """Mixer that returns its values themselves, with memory of the projection."""

    def forward(self, q, k, v, grid, key_grid, mask=None, **_):
        return v


def test_a_mixer_of_another_package_keeps_the_fused_layers_of_its_host():
    block = filled(
        Block(DIM, GlobalAttention(DIM, HEADS, dict(type=Identity), local_kernel=3), MLP(DIM, 40), LN)
    ).eval()
    twin, x = fuse(block, DOUBLE), torch.randn(2, 3, 5, DIM, dtype=torch.float64)
    assert twin.attn.mixer is block.attn.mixer
    assert isinstance(twin.attn.qkv, fused.LinearStep) and isinstance(twin.ffn, fused.FeedForwardStep)
    torch.testing.assert_close(twin(x, StageContext.of(x)), block(x, StageContext.of(x)))


def test_windows_are_padded_for_convolutions_that_pad_otherwise(monkeypatch):
    monkeypatch.setattr(regions, 'SMALL_NUMEL', 0)
    module = attention('windows', 'inline', local_kernel=3)
    module.local = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(DIM, DIM, 3, groups=DIM).double()).eval()
    x = torch.randn(2, 7, 9, DIM, dtype=torch.float64)
    stage = StageContext.of(x)
    torch.testing.assert_close(fuse(module, DOUBLE)(x, stage), module(x, stage))
