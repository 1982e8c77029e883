# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from torch import nn

from mmlinattn.attention import Grid
from mmlinattn.layers import MLP, ConvFFN, ConvStem, DWConvFFN, PositionTable
from mmlinattn.layers.position import resize_table
from mmlinattn.ops import apply_linear, conv_norms, gelu_of_conv, linear, takes_scale
from mmlinattn.ops.feed_forward import cpu as strips


@pytest.mark.usefixtures('fast_forms')
@pytest.mark.parametrize('ffn', [MLP, ConvFFN, DWConvFFN])
@pytest.mark.parametrize('height', [20, 17, 41])
@pytest.mark.parametrize('scaled', [True, False])
def test_strips_change_nothing(ffn, height, scaled, monkeypatch):
    module = ffn(4, 10).double()
    x = torch.randn(2, height, 3, 4, dtype=torch.float64)
    scale = torch.rand(4, dtype=torch.float64) if scaled else None
    whole = module(x, scale)
    calls = []
    hidden = module.hidden
    monkeypatch.setattr(module, 'hidden', lambda x: calls.append(x.shape[1]) or hidden(x))
    monkeypatch.setattr(strips, 'STRIP_NUMEL', 3 * 10 * 8)
    with torch.no_grad():
        torch.testing.assert_close(module(x, scale), whole)
    assert len(calls) == 2 * -(-height // 8) and max(calls) <= 8 + 2 * ffn.halo


def test_strips_of_tokens(monkeypatch):
    module, x = MLP(4, 10), torch.randn(3, 50, 4)
    whole = module(x)
    monkeypatch.setattr(strips, 'STRIP_NUMEL', 70)
    with torch.no_grad():
        torch.testing.assert_close(module(x), whole)


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('gelu', [True, False])
@pytest.mark.parametrize('shape', [(7, 6), (2, 3, 5, 6), (0, 6)], ids=str)
def test_inference_multiplies_as_training_does(shape, gelu, bias):
    layer, x = nn.Linear(6, 10, bias=bias), torch.randn(shape)
    expected = apply_linear(layer, x, gelu=gelu)
    with torch.no_grad():
        torch.testing.assert_close(apply_linear(layer, x, gelu=gelu), expected)
        strided = torch.randn(*shape[:-1], 18)[..., 6:12]
        torch.testing.assert_close(
            linear(strided, layer.weight, layer.bias), nn.functional.linear(strided, layer.weight, layer.bias)
        )


def test_products_under_autocast_are_of_its_type():
    """Also where a faster product in float32 is at hand, which `torch.autocast` was asked to leave."""
    layer, x = nn.Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert apply_linear(layer, x).dtype == layer(x).dtype == torch.bfloat16
        assert apply_linear(layer, x, gelu=True).dtype == torch.bfloat16
        assert stem(image).dtype == torch.bfloat16


def test_a_layer_scale_that_half_precision_cannot_hold_is_applied_after_the_product():
    assert takes_scale(torch.zeros(1)) and not takes_scale(torch.zeros(1, dtype=torch.float16))
    with torch.autocast('cpu', torch.float16):
        assert not takes_scale(torch.zeros(1))


def test_hooks_and_adapters_are_called():
    layer, x, seen = nn.Linear(3, 4), torch.randn(2, 3), []
    handle = layer.register_forward_hook(lambda *args: seen.append(args))
    with torch.no_grad():
        hooked = apply_linear(layer, x, torch.ones(4), gelu=True)
        handle.remove()
        torch.testing.assert_close(apply_linear(layer, x, gelu=True), hooked)
    assert len(seen) == 1


@pytest.mark.parametrize('gelu', [True, False])
@pytest.mark.parametrize('width', [70, 200])  # the narrower of input and output is copied for the weight's gradient
@pytest.mark.parametrize('needed', [(True, True, True), (False, True, True), (True, False, False)], ids=str)
def test_gradients_of_large_products(needed, width, gelu):
    leaves = [torch.randn(2, 700, 96), torch.randn(width, 96), torch.randn(width)]
    for leaf, wanted in zip(leaves, needed):
        leaf.requires_grad_(wanted)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    plain = nn.functional.linear(*leaves)
    outs = linear(*leaves, gelu=gelu), nn.functional.gelu(plain) if gelu else plain
    probe = torch.randn_like(outs[0])
    torch.testing.assert_close(*outs)
    for ours, theirs in zip(*(torch.autograd.grad((out * probe).sum(), wanted) for out in outs)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    'conv',
    [
        lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
        lambda: nn.Conv2d(6, 4, 5, stride=2, padding=1, dilation=2, groups=2, bias=False),
        lambda: nn.Conv2d(6, 6, 3, padding='same'),
        lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect'),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1)),
        lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()),
    ],
    ids=['depthwise', 'strided', 'same', 'reflect', 'weight norm', 'adapter'],
)
@pytest.mark.parametrize('memory_format', [torch.channels_last, torch.contiguous_format], ids=str)
def test_gelu_of_conv(conv, memory_format):
    conv, x = conv(), torch.randn(2, 6, 9, 12).contiguous(memory_format=memory_format)
    expected = nn.functional.gelu(conv(x))
    torch.testing.assert_close(gelu_of_conv(x, conv), expected)
    seen = []
    with torch.no_grad():
        torch.testing.assert_close(gelu_of_conv(x, conv), expected)
        torch.testing.assert_close(gelu_of_conv(x[:0], conv), expected[:0])
        conv.register_forward_hook(lambda module, args, out: seen.append(out))
        torch.testing.assert_close(gelu_of_conv(x, conv), expected)
    assert len(seen) == 1


@pytest.mark.parametrize('norm', ['BN', 'GN', None])
@pytest.mark.parametrize('training', [True, False])
def test_stem_without_gradients_gives_what_it_gives_with_them(norm, training):
    """Norms folded and GELU in the convolution; statistics of a batch are not folded."""
    cfg = dict(type='BN') if norm is None else dict(type=norm, **(dict(num_groups=2) if norm == 'GN' else {}))
    stem = ConvStem(3, 8, cfg)
    for module in stem.modules():
        if isinstance(module, nn.BatchNorm2d):
            for buffer in (module.running_mean, module.running_var, module.weight, module.bias):
                nn.init.uniform_(buffer, 0.5, 1.5)
    if norm is None:  # as a model folded for deployment
        stem.layers = nn.Sequential(*(layer for layer in stem.layers if not isinstance(layer, nn.BatchNorm2d)))
    stem.train(training)
    x = torch.randn(2, 21, 30, 3)
    expected = stem(x)
    with torch.no_grad():
        torch.testing.assert_close(stem(x), expected, rtol=1e-4, atol=1e-5)


def test_hooks_of_norms_are_called():
    """In inference a batch norm goes into the convolution before it, but for one that somebody watches."""
    stem, x, seen = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3), []
    with torch.no_grad():
        expected = stem(x)
        for module in stem.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda *args: seen.append(args))
        torch.testing.assert_close(stem(x), expected)
    assert len(seen) == 4


@pytest.mark.parametrize(
    'shape', [(), (9,), (10, 6), (9, 6), (1, 1, 9, 6), (1, 11, 6), (1, 9, 6), (1, 1, 6), (1, 0, 6)], ids=str
)
def test_position_tables_of_another_form_stay(shape):
    """What they are is for the report of the loading to say."""
    weight = torch.randn(shape)
    assert PositionTable(6, (4, 4), prefix=1).fit(weight) is weight


def test_position_tables_of_another_grid_are_resized():
    weight = torch.randn(1, 10, 6)
    fitted = PositionTable(6, (4, 4), prefix=1).fit(weight)
    assert fitted.shape == (1, 17, 6) and torch.equal(fitted[:, 0], weight[:, 0])


@pytest.mark.parametrize('part', [(3, 5), (2, 4), (3, 2)])
def test_tables_of_part_of_a_window_are_those_of_the_window(part):
    """In graphs, whose sizes are open, as in eager runs; only there the grid may go beyond."""
    table = PositionTable(6, (4, 6)).double()
    whole = resize_table(table.weight, (4, 6), (3, 5)).unflatten(1, (3, 5))
    grid = Grid(*part, within=(3, 5))
    expected = whole[:, : part[0], : part[1]].flatten(1, 2)
    torch.testing.assert_close(table.on(grid), expected)
    torch.testing.assert_close(table.resized_in_graph(grid), expected)
    beyond = table.resized_in_graph(Grid(4, 7, within=(3, 5))).unflatten(1, (4, 7))
    torch.testing.assert_close(beyond[:, :3, :5], whole)


@pytest.mark.parametrize('training', [False, True])
def test_norms_that_train_use_their_batch_without_gradients_too(training):
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    nn.init.uniform_(norm.running_var, 2, 3)
    nn.init.uniform_(norm.running_mean, 2, 3)
    norm.train(training)
    before, x = norm.running_mean.clone(), torch.randn(2, 3, 8, 9)
    with torch.no_grad():
        image = conv(x)
        mean, var = (
            (image.mean((0, 2, 3)), image.var((0, 2, 3), unbiased=False)) if training else (before, norm.running_var)
        )
        expected = (image - mean[:, None, None]) / (var + norm.eps).sqrt()[:, None, None]
        torch.testing.assert_close(conv_norms(x, [(conv, norm)]), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(norm.running_mean, before) is not training
