# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import copy
import pickle
from types import MethodType

import pytest
import torch
from torch import nn

from mmlinattn import attention
from mmlinattn.attention import Grid
from mmlinattn.backbones import nextvit_blocks as nextvit
from mmlinattn.layers import (
    MLP,
    Block,
    ConvDownsample,
    ConvFFN,
    ConvStem,
    DWConvFFN,
    PatchEmbed,
    PatchMerging,
    PositionTable,
    ResidualDWConv,
    apply_linear,
    conv_norms,
    fold_batch_norm,
    strided_conv,
)
from mmlinattn.layers import (
    block as blocks,
)
from mmlinattn.layers.compact import BranchedLinear
from mmlinattn.layers.linear import project, split_parts
from mmlinattn.layers.position import resize_table
from mmlinattn.ops import dispatch


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
    monkeypatch.setattr(blocks, 'STRIP_NUMEL', 3 * 10 * 8)
    with torch.no_grad():
        torch.testing.assert_close(module(x, scale), whole)
    assert len(calls) == 2 * -(-height // 8) and max(calls) <= 8 + 2 * ffn.halo


def test_strips_of_tokens(monkeypatch):
    module, x = MLP(4, 10), torch.randn(3, 50, 4)
    whole = module(x)
    monkeypatch.setattr(blocks, 'STRIP_NUMEL', 70)
    with torch.no_grad():
        torch.testing.assert_close(module(x), whole)


@pytest.mark.usefixtures('fast_forms')
def test_strips_are_for_layers_that_nobody_watches(monkeypatch):
    monkeypatch.setattr(blocks, 'STRIP_NUMEL', 70)
    module, x, seen = MLP(4, 10), torch.randn(3, 50, 2, 4), []
    residual = torch.randn(3, 50, 2, 4)
    with torch.no_grad():
        expected = module.fc2(nn.functional.gelu(module.fc1(x))) + residual
        torch.testing.assert_close(module(x, residual=residual), expected)
        assert module(x[:0]).shape == (0, 50, 2, 4)
        module.fc2.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape))
        torch.testing.assert_close(module(x, residual=residual), expected)
    assert seen == [(3, 50, 2, 10)]


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('scale', [True, False])
def test_a_scale_goes_into_the_matrix(scale, bias):
    layer, x, factor = nn.Linear(6, 4, bias=bias), torch.randn(2, 3, 6), torch.randn(4) if scale else None
    expected = nn.functional.linear(x, layer.weight, layer.bias) * (factor if scale else 1)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(apply_linear(layer, x, factor), expected)
            torch.testing.assert_close(apply_linear(nn.Sequential(layer), x, factor), expected)


def test_products_under_autocast_are_of_its_type():
    """Also where a faster product in float32 is at hand, which `torch.autocast` was asked to leave."""
    layer, x = nn.Linear(64, 64), torch.randn(2, 40, 64)
    stem, image = ConvStem(3, 8, dict(type='BN')).eval(), torch.randn(1, 32, 32, 3)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert apply_linear(layer, x).dtype == layer(x).dtype == torch.bfloat16
        assert apply_linear(layer, x, gelu=True).dtype == torch.bfloat16
        assert stem(image).dtype == torch.bfloat16


def test_a_layer_scale_that_half_precision_cannot_hold_is_applied_after_the_product():
    assert dispatch.takes_scale(torch.zeros(1)) and not dispatch.takes_scale(torch.zeros(1, dtype=torch.float16))
    with torch.autocast('cpu', torch.float16):
        assert not dispatch.takes_scale(torch.zeros(1))


def test_hooks_and_adapters_are_called():
    layer, x, seen = nn.Linear(3, 4), torch.randn(2, 3), []
    handle = layer.register_forward_hook(lambda *args: seen.append(args))
    with torch.no_grad():
        hooked = apply_linear(layer, x, torch.ones(4), gelu=True)
        handle.remove()
        torch.testing.assert_close(apply_linear(layer, x, gelu=True), hooked)
    assert len(seen) == 1


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('reduced', [False, True])
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('backend', ['reference', 'eager', 'cpu'])
def test_projections_of_every_backend(backend, bias, reduced, gated, monkeypatch):
    """GPUs get ``eager``: no other test on a CPU does. Rows of the weight: queries, keys, values, gate."""
    monkeypatch.setattr(dispatch, 'backend', lambda *tensors: backend)
    widths = (3, 4, 5, 6)[: 3 + gated]
    layer, x = nn.Linear(7, sum(widths), bias=bias), torch.randn(2, 6, 7)
    kv = torch.randn(2, 4, 7) if reduced else None
    sources = (x, kv, kv, x) if reduced else (x,) * 4
    rows = ((0, 3), (3, 7), (7, 12), (12, 18))
    expected = [
        source @ layer.weight[a:b].T + (layer.bias[a:b] if bias else 0)
        for source, (a, b) in zip(sources, rows[: len(widths)])
    ]
    for learns in (True, False):
        for convolves in (True, False):
            for module in (layer, nn.Sequential(layer)):
                with torch.set_grad_enabled(learns):
                    found = split_parts(project(module, x, widths, kv, convolves))
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('channels', [3, 8, 24, 40])
@pytest.mark.parametrize('kernel', [2, 4, 8])
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_patches_without_overlap(dtype, kernel, channels):
    """In bfloat16 oneDNN's own convolution of some of these shapes is wrong on CPUs with AMX."""
    conv, x = (
        nn.Conv2d(channels, 16, kernel, kernel).to(dtype),
        torch.randn(2, 2 * kernel + 1, 3 * kernel, channels).to(dtype),
    )
    padded = nn.functional.pad(x.double().permute(0, 3, 1, 2), (0, 0, 0, kernel - 1))
    expected = nn.functional.conv2d(padded, conv.weight.double(), conv.bias.double(), kernel).permute(0, 2, 3, 1)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            out = strided_conv(conv, x)
        assert out.dtype == dtype and out.shape == (2, 3, 3, 16)
        assert (out.double() - expected).norm() < (0.01 if dtype == torch.bfloat16 else 1e-12) * expected.norm()


def doubled(module, bound=False):
    """With a ``forward`` of its own, as some put one on an instance: a function, or a method of the module."""
    original = module.forward
    module.forward = MethodType(lambda self, x: 2 * original(x), module) if bound else lambda x: 2 * original(x)
    return module


# what is no plain convolution: its weight alone does not say what it computes
OTHER_CONVS = {
    'same': lambda: nn.Conv2d(6, 6, 3, padding='same'),
    'reflect': lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect'),
    'weight norm': lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1)),
    'adapter': lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()),
    'forward': lambda: doubled(nn.Conv2d(6, 6, 3, padding=1)),
    'bound forward': lambda: doubled(nn.Conv2d(6, 6, 3, padding=1), bound=True),
}
CONVS = {
    'depthwise': lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    **OTHER_CONVS,
}


@pytest.mark.parametrize('conv', CONVS.values(), ids=CONVS)
def test_gelu_of_a_convolution_of_any_kind(conv):
    ffn, x, seen = DWConvFFN(3, 6), torch.randn(2, 9, 12, 3), []
    ffn.dwconv = conv()
    expected = ffn.fc2(nn.functional.gelu(ffn.dwconv(ffn.fc1(x).permute(0, 3, 1, 2))).permute(0, 2, 3, 1))
    torch.testing.assert_close(ffn(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(ffn(x), expected)
        ffn.dwconv.register_forward_hook(lambda module, args, out: seen.append(out))
        torch.testing.assert_close(ffn(x), expected)
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
    torch.testing.assert_close(stem.layers(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(stem(x), expected, rtol=1e-4, atol=1e-5)


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


NORMS = {
    'batch norm': nn.BatchNorm2d,
    'without weights': lambda dim: nn.BatchNorm2d(dim, affine=False),
    'without statistics': lambda dim: nn.BatchNorm2d(dim, track_running_stats=False),
    'one of images': lambda dim: nn.InstanceNorm2d(dim, affine=True),
    'with a forward of its own': lambda dim: doubled(nn.BatchNorm2d(dim)),
    'of a class with one': lambda dim: Shifted(dim),
}


@pytest.mark.parametrize('norm', NORMS.values(), ids=NORMS)
@pytest.mark.parametrize('training', [False, True])
def test_convolutions_and_norms_of_every_kind(training, norm):
    """As they are one after the other, with gradients and without; kernels of several sizes, and groups in one."""
    convs = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 5, 1, 2)
    layers = [(conv, norm(conv.out_channels)) for conv in convs]
    for _, module in layers:
        for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
            if tensor is not None:
                nn.init.uniform_(tensor, 0.5, 1.5)
        module.train(training)
    x, grouped = torch.randn(2, 4, 9, 7), nn.Conv2d(4, 6, 3, 2, 1, groups=2)
    expected = x
    for conv, module in layers:
        expected = nn.functional.gelu(expected) if conv is not convs[0] else expected
        expected = module(conv(expected))
    alone = layers[0][1](grouped(x))
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            found, of_groups = conv_norms(x, layers), conv_norms(x, [(grouped, layers[0][1])])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(of_groups, alone, rtol=1e-4, atol=1e-5)
        if learns:
            leaves = [parameter for conv in convs for parameter in conv.parameters()]
            for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected))):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('place', [0, 1, 2])
@pytest.mark.parametrize('conv', [*OTHER_CONVS.values(), lambda: nn.Conv2d(6, 6, 3, padding=1)], ids=[*OTHER_CONVS, ''])
def test_one_convolution_among_plain_ones_runs_as_it_is(conv, place):
    """What is no plain one, and any that somebody watches."""
    convs = [nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)]
    convs[place] = conv()
    layers, x, seen = [(module, nn.BatchNorm2d(6).eval()) for module in convs], torch.randn(1, 6, 5, 7), []
    expected = x
    for i, (module, norm) in enumerate(layers):
        expected = norm(module(nn.functional.gelu(expected) if i else expected))
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(conv_norms(x, layers), expected, rtol=1e-4, atol=1e-5)
    for kind in ('register_forward_hook', 'register_forward_pre_hook'):
        handle = getattr(convs[place], kind)(lambda *args: seen.append(args[0]))
        for learns in (True, False):
            with torch.set_grad_enabled(learns):
                conv_norms(x, layers)
        handle.remove()
    assert seen == [convs[place]] * 4


@pytest.mark.parametrize(('bias', 'shift'), [(True, -17.5), (False, -23.5)])
def test_a_batch_norm_in_a_convolution(bias, shift):
    """3 (2 x + 1 - 4) / sqrt(0.21 + 0.04) + 0.5 by hand; in the type of the convolution."""
    conv, norm = nn.Conv2d(1, 2, 1, bias=bias), nn.BatchNorm2d(2, eps=0.04)
    values = [(conv.weight, 2), (norm.weight, 3), (norm.bias, 0.5), (norm.running_mean, 4), (norm.running_var, 0.21)]
    for tensor, value in [*values, *([(conv.bias, 1)] if bias else [])]:
        nn.init.constant_(tensor, value)
    norm.weight.data[1] = 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        folded = fold_batch_norm(conv.to(dtype), norm)
        expected = torch.tensor([[[[12.0]]], [[[0]]]]), torch.tensor([shift, 0.5])
        for tensor, other in zip(folded, expected):
            torch.testing.assert_close(
                tensor.detach(), other.to(dtype), rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=0
            )


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


def padded(x, multiple):
    """A map with zeros at the bottom and right, of whole strides."""
    out = x.new_zeros(len(x), *(-(-side // multiple) * multiple for side in x.shape[1:3]), x.shape[-1])
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


@pytest.mark.parametrize('size', [(8, 8), (7, 9), (1, 2), (5, 1)], ids=str)
def test_patches_of_maps_of_any_size(size):
    """Those at the border are filled up with zeros; four neighbours of Swin's: down first, then right."""
    x = torch.randn(2, *size, 3)
    for kernel, stride, padding in ((4, 4, 0), (2, 2, 0), (7, 4, 3), (3, 2, 1), (4, 4, 1)):
        embed = PatchEmbed(3, 5, kernel, stride, padding, dict(type='LN', eps=0.5))
        conv = embed.proj
        image = nn.functional.pad(padded(x, stride).permute(0, 3, 1, 2), [padding, kernel, padding, kernel])
        height, width = (-(-side // stride) for side in size)
        expected = nn.functional.conv2d(image, conv.weight, conv.bias, stride)[..., :height, :width].permute(0, 2, 3, 1)
        torch.testing.assert_close(embed(x), nn.functional.layer_norm(expected, (5,), eps=0.5))
        embed.norm = None
        torch.testing.assert_close(embed(x), expected)
    assert PatchEmbed(3, 5, 4, 4).norm is None
    merging = PatchMerging(3, 5, dict(type='LN', eps=0.5))
    assert merging.reduction.bias is None
    even = padded(x, 2)
    neighbours = [even[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    expected = nn.functional.layer_norm(torch.cat(neighbours, dim=-1), (12,), eps=0.5) @ merging.reduction.weight.T
    torch.testing.assert_close(merging(x), expected)


@pytest.mark.parametrize('size', [(8, 8), (7, 9), (1, 2)], ids=str)
def test_stem_and_downsampling_are_their_convolutions(size):
    stem, down = ConvStem(3, 8, dict(type='BN')), ConvDownsample(3, 5, dict(type='BN'))
    convs = [layer for layer in stem.layers if isinstance(layer, nn.Conv2d)]
    assert [(conv.in_channels, conv.out_channels) for conv in convs] == [(3, 4), (4, 4), (4, 4), (4, 8)]
    x = torch.randn(2, *size, 3)
    image = x.permute(0, 3, 1, 2)
    coarse = nn.functional.conv2d(image, down.layers.conv.weight, down.layers.conv.bias, 2, 1)
    for i, (conv, stride) in enumerate(zip(convs, (2, 1, 1, 2))):
        image = nn.functional.gelu(image) if i else image
        image = nn.functional.conv2d(image, conv.weight, conv.bias, stride, 1)
        if i < 3:
            image = nn.functional.batch_norm(image, None, None, training=True)
    if size != (1, 2):  # batch statistics of one pixel
        torch.testing.assert_close(
            stem(x).permute(0, 3, 1, 2),
            nn.functional.batch_norm(image, None, None, training=True),
            rtol=1e-3,
            atol=1e-4,
        )
    stem.eval(), down.eval()
    assert stem(x).shape == (2, -(-size[0] // 4), -(-size[1] // 4), 8)
    expected = coarse.permute(0, 2, 3, 1) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(down(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(down(x), expected)
    del down.layers.norm  # folded for deployment
    torch.testing.assert_close(down(x), coarse.permute(0, 2, 3, 1))


@pytest.mark.parametrize('ffn', [MLP, ConvFFN, DWConvFFN])
def test_feed_forward_networks_are_their_equations(ffn):
    module, x = ffn(4, 6), torch.randn(2, 3, 5, 4)
    gelu = nn.functional.gelu
    hidden = nn.functional.linear(x, module.fc1.weight, module.fc1.bias)

    def conv(y):
        image = y.permute(0, 3, 1, 2)
        kernel = module.dwconv.weight, module.dwconv.bias
        return nn.functional.conv2d(image, *kernel, padding=1, groups=6).permute(0, 2, 3, 1)

    hidden = gelu(conv(hidden)) if ffn is DWConvFFN else gelu(hidden)
    hidden = hidden + conv(hidden) if ffn is ConvFFN else hidden
    expected = nn.functional.linear(hidden, module.fc2.weight, module.fc2.bias)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize('size', [3, 5])
@pytest.mark.parametrize('of_gelu', [False, True])
def test_a_convolution_beside_what_it_convolves(of_gelu, size):
    layer, x = ResidualDWConv(4, size), torch.randn(2, 3, 5, 4)
    image = (nn.functional.gelu(x) if of_gelu else x).permute(0, 3, 1, 2)
    expected = image + nn.functional.conv2d(image, layer.weight, layer.bias, padding=size // 2, groups=4)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(layer(x, of_gelu), expected.permute(0, 2, 3, 1))
    assert ResidualDWConv(4).weight.shape == (4, 1, 3, 3)


def test_position_tables_start_with_small_random_vectors():
    """Of standard deviation 0.02, as in the released ViTs; those of class tokens, too."""
    table = PositionTable(4096, (2, 3), prefix=2).weight[0].detach()
    assert table.std(dim=1).tolist() == pytest.approx(8 * [0.02], rel=0.1)


def test_position_tables_are_added_in_the_type_of_the_tokens():
    """Class tokens that the table has no vectors for get none; those that it has, as they are."""
    table = PositionTable(6, (2, 3), prefix=1)
    patches = table.weight[:, 1:]
    x = torch.randn(2, 7, 6)
    torch.testing.assert_close(table.add_to(x, Grid(2, 3, prefix=1)), x + table.weight)
    half = x.bfloat16()
    torch.testing.assert_close(table.add_to(half, Grid(2, 3, prefix=1)), half + table.weight.bfloat16())
    found = PositionTable.on(table, Grid(2, 3, prefix=3))
    assert not found[:, :2].any()
    torch.testing.assert_close(found[:, 2:], table.weight)
    assert found[:, 3:].shape == patches.shape
    halved = copy.deepcopy(table).half()
    resized = halved.resized(4, 5)
    assert resized.dtype == torch.float16 and torch.equal(resized[:, :1], halved.weight[:, :1])
    torch.testing.assert_close(resized.float(), table.resized(4, 5), rtol=0.01, atol=1e-4)


@pytest.mark.usefixtures('fast_forms')
def test_copies_of_position_tables_go_without_what_was_kept():
    """It may belong to a graph, or to inference, of which copies and pickles know nothing."""
    table = PositionTable(6, (2, 3))
    with torch.no_grad():
        kept = table.resized(4, 5)
    assert table._resized is not None
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert copied._resized is None and torch.equal(copied.weight, table.weight)
        with torch.no_grad():
            torch.testing.assert_close(copied.resized(4, 5), kept)
    with torch.no_grad():
        assert table.resized(4, 5) is kept


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


@pytest.mark.parametrize('prefix', [0, 2])
def test_tables_in_graphs_keep_the_vectors_of_class_tokens(prefix):
    table = PositionTable(6, (4, 6), prefix).double()
    for size in ((3, 5), (4, 6), (7, 1)):
        expected = resize_table(table.weight, (4, 6), size, prefix)
        torch.testing.assert_close(table.resized_in_graph(Grid(*size, prefix=prefix)), expected)
        torch.testing.assert_close(table.on(Grid(*size, prefix=prefix)), expected)
    assert table.half().resized_in_graph(Grid(3, 5)).dtype == torch.float16


@pytest.mark.usefixtures('fast_forms')
@pytest.mark.parametrize('kind', ['BN', 'SyncBN'])
def test_fixed_batch_norms_take_no_pass_of_their_own(kind, monkeypatch):
    """In inference they are part of the convolution before them."""
    stem, x = ConvStem(3, 8, dict(type=kind)).eval(), torch.randn(1, 16, 16, 3)
    monkeypatch.setattr(nn.functional, 'batch_norm', None)
    with torch.no_grad():
        assert stem(x).shape == (1, 4, 4, 8)


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


CONSTANT = dict(type='Constant', layer=['Linear', 'Conv1d', 'Conv2d', 'LayerNorm', '_BatchNorm'], val=0.25, bias=2.0)
BN, LN = dict(type='BN'), dict(type='LN')
PARTS = {
    'MLP': lambda **cfg: MLP(4, 6, **cfg),
    'ConvFFN': lambda **cfg: ConvFFN(4, 6, **cfg),
    'DWConvFFN': lambda **cfg: DWConvFFN(4, 6, **cfg),
    'ReLUMLP': lambda **cfg: nextvit.ReLUMLP(4, 6, **cfg),
    'ConvStem': lambda **cfg: ConvStem(3, 4, BN, **cfg),
    'ConvDownsample': lambda **cfg: ConvDownsample(4, 6, BN, **cfg),
    'PatchEmbed': lambda **cfg: PatchEmbed(3, 4, 4, 4, norm_cfg=LN, **cfg),
    'PatchMerging': lambda **cfg: PatchMerging(4, 6, LN, **cfg),
    'Block': lambda **cfg: Block(4, nn.Linear(4, 4), nn.Linear(4, 4), LN, **cfg),
    'BranchedLinear': lambda **cfg: BranchedLinear(4, 6, 2, dict(type='BN1d'), **cfg),
    'Attention': lambda **cfg: attention.Attention(8, 2, 'inline', **cfg),
    'GlobalAttention': lambda **cfg: attention.GlobalAttention(8, 2, 'rala', local_kernel=3, **cfg),
    'ReducedAttention': lambda **cfg: attention.ReducedAttention(8, 2, 'softmax', 2, LN, **cfg),
    'WindowAttention': lambda **cfg: attention.WindowAttention(8, 2, 'softmax', (3, 3), **cfg),
    'StripeAttention': lambda **cfg: attention.StripeAttention(8, 2, 'softmax', 2, **cfg),
    'AveragedKeysAttention': lambda **cfg: nextvit.AveragedKeysAttention(8, 2, 'softmax', 2, 'grid', BN, **cfg),
    'ConvNorm': lambda **cfg: nextvit.ConvNorm(4, 6, BN, **cfg),
    'PooledEmbed': lambda **cfg: nextvit.PooledEmbed(4, 6, BN, **cfg),
    'ConvAttention': lambda **cfg: nextvit.ConvAttention(4, 2, BN, **cfg),
    'ConvBlock': lambda **cfg: nextvit.ConvBlock(4, 6, 2, MLP(6, 6), BN, 0.0, **cfg),
    'TransformerBlock': lambda **cfg: nextvit.TransformerBlock(4, nn.Linear(4, 4), 4, 6, 2, MLP(6, 6), BN, 0.0, **cfg),
    **{name: lambda kind=kind, **cfg: kind(8, 2, **cfg) for name, kind in attention.TOKEN_MIXERS.module_dict.items()},
}


@pytest.mark.parametrize('build', PARTS.values(), ids=PARTS)
def test_parts_start_as_their_init_cfg_says(build):
    """MMEngine's ``init_cfg``, which every module of OpenMMLab takes."""
    part = build(init_cfg=copy.deepcopy(CONSTANT))
    assert part.init_cfg == CONSTANT and build().init_cfg is None
    part.init_weights()
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d
    for module in part.modules():
        if isinstance(module, kinds):
            assert (module.weight == 0.25).all() and (module.bias is None or (module.bias == 2).all())
