# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Multiply-adds and memory against numbers calculated by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmlinattn.attention import Grid, HallucinatedMixer, InLineMixer
from mmlinattn.tooling.analysis.flops import CONV, LINEAR, PRODUCT, OpCounter


class Toy(nn.Module):
    """Model with an unnamed last layer, and non-contiguous rows before the first linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.nameless = [nn.Linear(6, 5, bias=False)]

    def forward(self, x):
        x = self.linear(self.conv(x).permute(0, 2, 3, 1)).flatten(1, 2)
        state = x.transpose(1, 2) @ x
        x = self.norm(x)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], self.nameless[0](x)[:, None]), state


def test_deformable_convolutions():
    deform_conv2d = pytest.importorskip('torchvision.ops').deform_conv2d
    x, offset, weight = (torch.empty(*shape, device='meta') for shape in ((1, 4, 9, 7), (1, 18, 9, 7), (6, 2, 3, 3)))
    with OpCounter(nn.Identity()) as count:
        deform_conv2d(x, offset, weight, padding=1)
    assert count.macs == {('', CONV): 6 * 9 * 7 * 2 * 9}


def test_convolutions_by_predicted_kernels():
    with torch.device('meta'):
        mixer, mean = InLineMixer(24, 3), torch.zeros(2, 24)
        q, k, v = torch.zeros(3, 2, 20, 24)
    with torch.no_grad(), OpCounter(mixer) as count:
        assert mixer(q, k, v, Grid(4, 5), Grid(4, 5), context=mean).shape == (2, 20, 24)
    assert count.macs['residual', CONV] + count.macs['', CONV] == 2 * 20 * 24 * 9


def test_attention_called_by_names():
    q, k, v = (torch.empty(1, 2, n, 4, device='meta') for n in (6, 5, 5))
    for args, named in ((3, ()), (1, ('key', 'value')), (0, ('query', 'key', 'value'))):
        with OpCounter(nn.Identity()) as count:
            F.scaled_dot_product_attention(*(q, k, v)[:args], **dict(zip(named, (q, k, v)[args:])))
        assert count.macs == {('', PRODUCT): 2 * 6 * 5 * 8}


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_counts_by_kind_and_module(device):
    """Count twice with equal results. Unnamed modules and products belong to the module around them."""
    with torch.device(device):
        model, x = nn.Sequential(Toy()), torch.zeros(2, 4, 5, 7)
        for layer in model[0].nameless:
            layer.to(device)
    tokens, call = 2 * 5 * 7, nn.Module.__call__
    for _ in range(2):
        with torch.no_grad(), OpCounter(model) as count:
            model(x)
        assert count.macs == {
            ('0.conv', CONV): tokens * 8 * 2 * 9,
            ('0.linear', LINEAR): tokens * 8 * 6,
            ('0', LINEAR): tokens * 6 * 5,
            ('0', PRODUCT): tokens * 6 * 6 + tokens * 35 * (6 + 5),
        }
        assert nn.Module.__call__ is call


@pytest.mark.parametrize(
    ('steps', 'taps'), [((), 0), (('ihh',), 9 * 3), (('chh',), 3 * 3), (('ihh', 'chh'), 9 * 3 + 3 * 3)]
)
def test_hallucinated_attention_counts_as_its_paper_counts(steps, taps):
    """Count products of all heads, a 3x3 convolution of half of the maps, and their mixture. No map is in memory."""
    with torch.device('meta'):
        mixer = HallucinatedMixer(24, 3, steps=steps)
        q, k, v = torch.zeros(2, 30, 12), torch.zeros(2, 20, 12), torch.zeros(2, 20, 24)
    with torch.no_grad(), OpCounter(mixer) as count:
        assert mixer(q, k, v, Grid(5, 6), Grid(4, 5)).shape == (2, 30, 24)
    assert count.macs == {('', PRODUCT): 2 * 30 * 20 * (12 + 24 + taps)}
    assert count.peak_bytes < 2 * 4 * 30 * 24 * 4


def test_memory_counts_live_storages():
    with OpCounter(nn.Identity()) as count:
        for length in range(1, 8):
            x = torch.zeros(1000 * length, device='meta')
    assert count.peak_bytes == 4 * (6000 + 7000) and len(x) == 7000
    with torch.inference_mode(), OpCounter(nn.Identity()) as count:
        kept = torch.zeros(1000, device='meta')[:1]
        other = torch.zeros(500, device='meta')
    assert count.peak_bytes == 4 * (1000 + 500) and (len(kept), len(other)) == (1, 500)
