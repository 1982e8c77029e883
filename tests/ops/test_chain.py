# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Leaves and fused chains on CPUs without gradients equal PyTorch's layers called one after another.

tests/backbones/test_changed_modules.py has the matrix of changed layers.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import small_backbones
from helpers.references import DIM, HEADS, filled
from torch import nn

from mmlinattn.attention import GlobalAttention, StageContext, TokenMixer
from mmlinattn.layers import MLP, Block, ConvDownsample, ConvFFN, ConvStem, DWConvFFN, Linear, ResidualDWConv, compact
from mmlinattn.ops import fused, leaves
from mmlinattn.utils import private_apis

LN = dict(type='LN', eps=1e-6)
pytestmark = pytest.mark.usefixtures('fast_forms')


def without_gradients(module, *args):
    with torch.no_grad():
        return module(*args)


@pytest.fixture
def kernels(monkeypatch):
    """Record each fused chain as a list of (class of the layer, has a norm, has GELU)."""
    seen, plan = [], fused.plan

    def noted(steps):
        found = plan(steps)
        seen.append([(type(k.step).__name__, k.norm is not None, k.gelu) for k in found if k.plain])
        return found

    monkeypatch.setattr(fused, 'plan', noted)
    return seen


def with_conv(ffn, conv):
    ffn.dwconv = conv
    return ffn


FFNS = {
    'mlp': (lambda: MLP(DIM, 40), [('Linear', False, True), ('Linear', False, False)]),
    'conv': (
        lambda: ConvFFN(DIM, 40),
        [('Linear', False, True), ('ResidualDWConv', False, False), ('Linear', False, False)],
    ),
    'dwconv': (
        lambda: DWConvFFN(DIM, 40),
        [('Linear', False, False), ('Conv2d', False, True), ('Linear', False, False)],
    ),
    'conv 5': (lambda: with_conv(ConvFFN(DIM, 40), ResidualDWConv(40, 5, of_gelu=True)), None),
    'dwconv 5': (lambda: with_conv(DWConvFFN(DIM, 40), leaves.Conv2d(40, 40, 5, padding=2, groups=40)), None),
    'strided': (lambda: with_conv(DWConvFFN(DIM, 40), leaves.Conv2d(40, 40, 3, 2, 1, groups=40)), None),
    'dilated': (lambda: with_conv(DWConvFFN(DIM, 40), leaves.Conv2d(40, 40, 3, 1, 2, 2, groups=40)), None),
    'same': (lambda: with_conv(DWConvFFN(DIM, 40), leaves.Conv2d(40, 40, 3, padding='same', groups=40)), None),
    'compact': (lambda: compact(ConvFFN(DIM, 40)), None),
    'compact M1': (lambda: compact(DWConvFFN(DIM, 40), matrix='M1'), None),
}


@pytest.mark.parametrize('size', [(20, 3), (17, 3), (41, 3)], ids=str)
@pytest.mark.parametrize('name', FFNS)
def test_feed_forward_networks(name, size, kernels, monkeypatch):
    make, expected = FFNS[name]
    module, x = filled(make()).eval(), torch.randn(2, *size, DIM, dtype=torch.float64)
    for numel in (fused.STRIP_NUMEL, 40 * 8 * size[1]):
        monkeypatch.setattr(fused, 'STRIP_NUMEL', numel)
        torch.testing.assert_close(without_gradients(module, x), module(x))
        assert expected in (None, kernels[-1])
        assert without_gradients(module, x[:0]).shape == module(x[:0]).shape


def test_strips_save_memory(monkeypatch):
    sizes, linear = [], fused.linear

    def noted(*args):
        out = linear(*args)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(fused, 'linear', noted)
    monkeypatch.setattr(fused, 'STRIP_NUMEL', 40 * 8 * 3)
    without_gradients(filled(ConvFFN(DIM, 40)).eval(), torch.randn(1, 41, 3, DIM, dtype=torch.float64))
    assert max(sizes) <= 40 * 10 * 3 and len(sizes) == 2 * 6


CHANGES = {
    'hook': lambda layer: layer.register_forward_hook(lambda module, args, out: out + 1) and layer,
    'pre-hook': lambda layer: layer.register_forward_pre_hook(lambda module, args: args[0] + 1) and layer,
    'forward': lambda layer: setattr(layer, 'forward', lambda x: type(layer).forward(layer, x) + 1) or layer,
    'wrapper': lambda layer: nn.Sequential(layer, nn.Tanh()),
}


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', ['fc1', 'dwconv', 'fc2'])
def test_a_changed_layer_of_a_chain_sees_whole_maps(name, change, monkeypatch):
    monkeypatch.setattr(fused, 'STRIP_NUMEL', 40 * 8 * 3)
    module, x = filled(ConvFFN(DIM, 40)).eval(), torch.randn(2, 41, 3, DIM, dtype=torch.float64)
    setattr(module, name, CHANGES[change](getattr(module, name)))
    calls = []
    getattr(module, name).register_forward_hook(lambda layer, args, out: calls.append(args[0].shape))
    expected = module(x)
    torch.testing.assert_close(without_gradients(module, x), expected)
    assert calls[0] == calls[1] and len(calls) == 2


@pytest.mark.parametrize('norm', ['BN', 'SyncBN', 'without weights', 'in training', 'GN'])
@pytest.mark.parametrize('kind', [ConvStem, ConvDownsample])
def test_batch_norms_are_folded(kind, norm, monkeypatch):
    """Fold batch norms with weights and running statistics in eval mode; call others."""
    cfgs = {'without weights': dict(affine=False), 'GN': dict(type='GN', num_groups=2), 'SyncBN': dict(type='SyncBN')}
    module = kind(4, 8, dict(dict(type='BN'), **cfgs.get(norm, {})))
    for buffer in module.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)
    module, x = filled(module).eval(), torch.randn(2, 16, 12, 4, dtype=torch.float64)
    if norm == 'in training':
        next(layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)).train().momentum = 0.0
    expected = module(x)
    if norm in ('BN', 'SyncBN'):
        monkeypatch.setattr(F, 'batch_norm', None)
    torch.testing.assert_close(without_gradients(module, x), expected)


def padded_in_a_circle(conv, around):
    conv.padding_mode, conv._reversed_padding_repeated_twice = 'circular', [around] * 4
    return conv


@pytest.mark.parametrize('mode', ['constant', 'circular'])
@pytest.mark.parametrize('of_gelu', [False, True])
@pytest.mark.parametrize('size', [3, 5])
def test_residual_convolutions(size, of_gelu, mode):
    layer, x = filled(ResidualDWConv(DIM, size, of_gelu)), torch.randn(2, 9, 7, DIM, dtype=torch.float64)
    if mode == 'circular':
        padded_in_a_circle(layer, size // 2)
    hidden = F.gelu(x) if of_gelu else x
    padded = F.pad(hidden.permute(0, 3, 1, 2), [size // 2] * 4, mode)
    conv = F.conv2d(padded, layer.weight, layer.bias, groups=DIM)
    for out in (layer(x), without_gradients(layer, x)):
        torch.testing.assert_close(out, hidden + conv.permute(0, 2, 3, 1))


def test_circular_padding_of_a_convolution_of_gelu():
    layer, x = filled(leaves.ConvOfGELU(DIM, 5, 3, padding=1)), torch.randn(2, DIM, 9, 7, dtype=torch.float64)
    expected = F.conv2d(F.pad(F.gelu(x), [1] * 4, 'circular'), layer.weight, layer.bias)
    torch.testing.assert_close(padded_in_a_circle(layer, 1)(x), expected)


@pytest.mark.parametrize('onednn', [True, False])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_products(dtype, onednn, monkeypatch):
    monkeypatch.setattr(private_apis, 'HAS_ONEDNN', private_apis.HAS_ONEDNN and onednn)
    layer = Linear(12, 10).to(dtype)
    tolerance = dict(rtol=0.05, atol=0.1) if dtype == torch.bfloat16 else {}
    for x in (torch.randn(3, 11, 12, dtype=dtype), torch.randn(3, 11, 30, dtype=dtype)[..., 6:18]):
        expected = F.linear(x, layer.weight, layer.bias)
        with torch.no_grad():
            strided = layer.weight.t().contiguous().t()
            torch.testing.assert_close(leaves.linear(x, strided, layer.bias), expected, **tolerance)
            torch.testing.assert_close(leaves.linear(x, layer.weight, layer.bias, True), F.gelu(expected), **tolerance)
            torch.testing.assert_close(layer(x), expected, **tolerance)
            assert layer(x[:0]).shape == (0, 11, 10)
        assert torch.equal(layer(x), expected)


def test_products_under_autocast_have_its_type():
    layer, x = Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        expected = F.linear(x, layer.weight, layer.bias)
        assert layer(x).dtype == expected.dtype == torch.bfloat16
        assert leaves.linear(x, layer.weight, layer.bias, True).dtype == stem(image).dtype == torch.bfloat16
        torch.testing.assert_close(layer(x), expected, rtol=0.05, atol=0.05)


def test_autocast_leaves_float64_alone():
    model = filled(small_backbones.build('LinearSwin', 'inline')).eval()
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        out = model(x)
    torch.testing.assert_close(out, without_gradients(model, x))


class Identity(TokenMixer):
    def forward(self, q, k, v, grid, key_grid, mask=None, **_):
        return v


def test_a_mixer_of_another_package_keeps_the_fast_layers_around_it(kernels, monkeypatch):
    """Use oneDNN around an unknown mixer, and overwrite nothing that a hook keeps."""
    attn = GlobalAttention(DIM, HEADS, dict(type=Identity), local_kernel=3)
    block = filled(Block(DIM, attn, MLP(DIM, 40), LN, position=ResidualDWConv(DIM))).eval().float()
    x = torch.randn(2, 3, 5, DIM)
    stage, kept, products = StageContext.of(x), [], []
    for module in block.modules():
        module.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    expected = block(x, stage)
    linear = private_apis.LINEAR
    monkeypatch.setattr(private_apis, 'LINEAR', lambda *args: products.append(args) or linear(*args))
    torch.testing.assert_close(without_gradients(block, x, stage), expected)
    assert all(torch.equal(*pair) for pair in kept)
    assert len(products) == (4 if private_apis.HAS_ONEDNN else 0)


@pytest.mark.parametrize('kind', ['Linear', 'Conv2d', 'LayerNorm'])
def test_tools_find_leaves_by_their_class(kind):
    ours, theirs = getattr(leaves, kind), getattr(nn, kind)
    own = type('Own', (ours,), {})
    assert {theirs: 1}.get(ours) == {ours: 1}.get(theirs) == 1 and ours == theirs and theirs == ours
    assert {theirs: 1, ours: 1}.get(own) is None and own != theirs and own != ours and own == own
    assert ours != nn.Identity and ours is not theirs
