# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from mmengine.registry import MODELS
from torch.nn import functional as F

from mmlinattn.necks import ConvProjectionNeck


def test_is_the_classifier_of_the_release():
    """1x1 convolution, batch norm, SiLU, global average; of the last of several maps."""
    torch.manual_seed(0)
    neck = MODELS.build(dict(type='ConvProjectionNeck', in_channels=6, out_channels=5)).double()
    x = torch.randn(3, 6, 4, 7, dtype=torch.double)
    neck.train()(x * 2 + 1)  # running statistics other than 0 and 1
    neck.eval()
    y = torch.einsum('oc,bchw->bohw', neck.proj.weight[:, :, 0, 0], x)
    y = y + neck.proj.bias[:, None, None]
    y = F.batch_norm(y, neck.norm.running_mean, neck.norm.running_var, neck.norm.weight, neck.norm.bias)
    expected = (y * y.sigmoid()).flatten(2).mean(2)
    outs = neck((torch.zeros(3, 2, 8, 14), x))
    assert isinstance(outs, tuple) and len(outs) == 1
    torch.testing.assert_close(outs[0], expected)
    torch.testing.assert_close(neck(x)[0], expected)


def test_another_width_is_named():
    with pytest.raises(ValueError, match='in_channels=6'):
        ConvProjectionNeck(6)((torch.rand(1, 4, 2, 2),))


# ---- SimpleFeaturePyramid


def pyramid(**options):
    return MODELS.build(dict(dict(type='SimpleFeaturePyramid', in_channels=8, out_channels=6), **options))


@pytest.mark.parametrize(('height', 'width'), [(64, 96), (70, 90), (33, 47), (49, 32)])
def test_levels_have_the_sizes_of_a_convolutional_pyramid(height, width):
    x = torch.randn(2, 8, -(-height // 16), -(-width // 16))
    outs = pyramid()((x,), image_size=(height, width))
    assert [tuple(out.shape) for out in outs] == [
        (2, 6, -(-height // stride), -(-width // stride)) for stride in (4, 8, 16, 32, 64)
    ]
    assert len(pyramid(num_outs=4)(x)) == 4


def test_levels_are_those_of_vitdet():
    """Fig. 2, written out: transposed convolutions up, max-pooling down, then 1x1 and 3x3 convolutions with norms."""
    neck = pyramid().double()
    x = torch.randn(2, 8, 3, 5, dtype=torch.double)

    def norm(y, layer):
        y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, correction=0) + 1e-6).sqrt()
        return y * layer.weight[:, None, None] + layer.bias[:, None, None]

    def up(y, layer):  # each pixel becomes 2x2
        y = torch.einsum('bchw,codf->bohdwf', y, layer.weight).flatten(4, 5).flatten(2, 3)
        return y + layer.bias[:, None, None]

    def finish(y, level):
        y = norm(torch.einsum('bchw,oc->bohw', y, level[1].weight[..., 0, 0]), level[2])
        return norm(F.conv2d(y, level[3].weight, padding=1), level[4])

    for level in neck.levels:
        for layer in (level[2], level[4]):  # weights and biases other than 1 and 0
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.normal_(layer.bias)
    four, eight, sixteen, thirty_two = neck.levels
    stem = four[0]
    pooled = torch.full((2, 8, 2, 3), -torch.inf, dtype=torch.double)
    for i in range(3):
        for j in range(5):
            pooled[:, :, i // 2, j // 2] = torch.maximum(pooled[:, :, i // 2, j // 2], x[:, :, i, j])
    expected = [
        finish(up(F.gelu(norm(up(x, stem[0]), stem[1])), stem[3]), four),
        finish(up(x, eight[0]), eight),
        finish(x, sixteen),
        finish(pooled, thirty_two),
    ]
    expected.append(expected[-1][..., ::2, ::2])
    outs = neck(x)
    assert len(outs) == len(expected)
    for out, truth in zip(outs, expected):
        torch.testing.assert_close(out, truth)


def test_cutting_keeps_positions():
    """A level of an odd image is the corner of the level of the padded one."""
    neck, x = pyramid(), torch.randn(1, 8, 3, 4)
    for cut, whole in zip(neck(x, image_size=(35, 50)), neck(x)):
        torch.testing.assert_close(cut, whole[..., : cut.shape[2], : cut.shape[3]])


@pytest.mark.parametrize(
    ('options', 'message'), [(dict(num_outs=6), 'num_outs=6'), (dict(in_channels=6), 'in_channels=6')]
)
def test_impossible_pyramids_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        pyramid(**options)


def test_another_map_is_named():
    with pytest.raises(ValueError, match='in_channels=8'):
        pyramid()(torch.rand(1, 4, 2, 2))
    with pytest.raises(ValueError, match=r'image_size=\(70, 64\)'):
        pyramid()(torch.rand(1, 8, 4, 4), image_size=(70, 64))
