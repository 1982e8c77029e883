# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Down-sampling, and convolutions with norms. RAVLT's stem: tests/backbones/test_ravlt.py."""

import pytest
import torch
from torch import nn

from mmlinattn.layers import ConvStem, DWConvFFN, PatchEmbed, PatchMerging, conv_norms, strided_conv


@pytest.mark.parametrize('channels', [3, 8, 24, 40])
@pytest.mark.parametrize('kernel', [2, 4, 8])
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_patches_without_overlap(dtype, kernel, channels):
    """In bfloat16 oneDNN's own convolution of some of these shapes is wrong on CPUs with AMX."""
    conv = nn.Conv2d(channels, 16, kernel, kernel).to(dtype)
    x = torch.randn(2, 2 * kernel + 1, 3 * kernel, channels).to(dtype)
    padded = nn.functional.pad(x.double().permute(0, 3, 1, 2), (0, 0, 0, kernel - 1))
    expected = nn.functional.conv2d(padded, conv.weight.double(), conv.bias.double(), kernel).permute(0, 2, 3, 1)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            out = strided_conv(conv, x)
        assert out.dtype == dtype and out.shape == (2, 3, 3, 16)
        assert (out.double() - expected).norm() < (0.01 if dtype == torch.bfloat16 else 1e-12) * expected.norm()


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


OTHER_CONVS = {  # their weight alone does not say what they compute
    'same': lambda: nn.Conv2d(6, 6, 3, padding='same'),
    'reflect': lambda: nn.Conv2d(6, 6, 3, padding=1, padding_mode='reflect'),
    'weight norm': lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 6, 3, padding=1)),
    'adapter': lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()),
}
OTHER_LAYERS = {
    'batch norm': lambda: (nn.Conv2d(6, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6)),
    'without weights': lambda: (nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, affine=False)),
    'without statistics': lambda: (nn.Conv2d(6, 6, 5, 1, 2), nn.BatchNorm2d(6, track_running_stats=False)),
    'one of images': lambda: (nn.Conv2d(6, 6, 3, 1, 1), nn.InstanceNorm2d(6, affine=True)),
    'of a class with one': lambda: (nn.Conv2d(6, 6, 3, 1, 1), Shifted(6)),
    **{name: lambda conv=conv: (conv(), nn.BatchNorm2d(6)) for name, conv in OTHER_CONVS.items()},
}


@pytest.mark.parametrize('place', [0, 1, 2])
@pytest.mark.parametrize('layer', OTHER_LAYERS.values(), ids=OTHER_LAYERS)
@pytest.mark.parametrize('training', [False, True])
def test_convolutions_and_norms_of_every_kind(training, layer, place):
    """One among plain ones, as they are one after the other, with gradients and without."""
    layers = [(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)) for _ in range(3)]
    layers[place] = layer()
    for _, module in layers:
        for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
            if tensor is not None:
                nn.init.uniform_(tensor, 0.5, 1.5)
        module.train(training)
    x, leaves = torch.randn(2, 6, 9, 7), [parameter for conv, _ in layers for parameter in conv.parameters()]
    expected = x
    for i, (conv, norm) in enumerate(layers):
        expected = norm(conv(nn.functional.gelu(expected) if i else expected))
    found = conv_norms(x, layers)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(conv_norms(x, layers), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('conv', OTHER_CONVS.values(), ids=OTHER_CONVS)
def test_another_convolution_of_a_feed_forward_network_is_called(conv):
    ffn, tokens = DWConvFFN(3, 6), torch.randn(2, 9, 12, 3)
    ffn.dwconv = conv()
    expected = ffn.fc2(nn.functional.gelu(ffn.dwconv(ffn.fc1(tokens).permute(0, 3, 1, 2))).permute(0, 2, 3, 1))
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(ffn(tokens), expected)


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


@pytest.mark.usefixtures('fast_forms')
@pytest.mark.parametrize('kind', ['BN', 'SyncBN'])
def test_fixed_batch_norms_take_no_pass_of_their_own(kind, monkeypatch):
    """In inference they are part of the convolution before them."""
    stem, x = ConvStem(3, 8, dict(type=kind)).eval(), torch.randn(1, 16, 16, 3)
    monkeypatch.setattr(nn.functional, 'batch_norm', None)
    with torch.no_grad():
        assert stem(x).shape == (1, 4, 4, 8)
