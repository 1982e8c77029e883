# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Down-sampling, and convolutions with norms. RAVLT's stem: tests/backbones/test_backbone_options.py."""

import pytest
import torch
from torch import nn

from mmlinattn.layers import PatchConv2d, PatchEmbed, PatchMerging


@pytest.mark.parametrize('channels', [3, 8, 24, 40])
@pytest.mark.parametrize('kernel', [2, 4, 8])
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_patches_without_overlap(dtype, kernel, channels):
    """Compare with a convolution. oneDNN's is wrong in bfloat16 for some of these shapes on CPUs with AMX."""
    conv = PatchConv2d(channels, 16, kernel).to(dtype)
    x = torch.randn(2, channels, 2 * kernel, 3 * kernel).to(dtype)
    expected = nn.functional.conv2d(x.double(), conv.weight.double(), conv.bias.double(), kernel)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            out = conv(x)
        assert out.dtype == dtype and out.shape == (2, 16, 2, 3)
        assert (out.double() - expected).norm() < (0.01 if dtype == torch.bfloat16 else 1e-12) * expected.norm()


def test_patches_may_be_made_to_overlap():
    conv, x = PatchConv2d(3, 16, 8), torch.randn(2, 3, 32, 24)
    conv.stride = (4, 4)
    torch.testing.assert_close(conv(x), nn.functional.conv2d(x, conv.weight, conv.bias, 4))


def padded(x, multiple):
    out = x.new_zeros(len(x), *(-(-side // multiple) * multiple for side in x.shape[1:3]), x.shape[-1])
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


@pytest.mark.parametrize('size', [(8, 8), (7, 9), (1, 2), (5, 1)], ids=str)
def test_patches_of_maps_of_any_size(size):
    """Pad patches at the border with zeros. PatchMerging orders Swin's four neighbours down first, then right."""
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
