# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import pytest
import torch
from mmengine.registry import MODELS
from torch.nn import functional as F

from mmlinattn.necks import ConvProjectionNeck, MapAdapter, SimpleFeaturePyramid


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


def test_checkpoints_fit_whatever_the_batch_norm():
    """As the release has them, with a bias before the norm; training on several GPUs synchronises it."""
    plain = ConvProjectionNeck(6, 5)
    for kind in ('BN', 'SyncBN'):
        ConvProjectionNeck(6, 5, norm_cfg=dict(type=kind)).load_state_dict(plain.state_dict())


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


def test_a_pyramid_is_of_the_last_of_several_maps():
    neck, x = pyramid(), torch.randn(1, 8, 3, 4)
    for out, expected in zip(neck([torch.zeros(1, 5, 3, 4), torch.zeros(1, 8, 3, 4), x]), neck(x), strict=True):
        assert torch.equal(out, expected)


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


# ---- what is not said


def test_defaults_are_those_of_the_documentation():
    """Widths, and uniform Xavier for convolutions: bounded by sqrt(6 / (fan in + fan out))."""
    assert ConvProjectionNeck(6).proj.out_channels == 1024
    assert type(ConvProjectionNeck(6).norm) is torch.nn.BatchNorm2d
    assert type(ConvProjectionNeck(6, 4, norm_cfg=dict(type='GN', num_groups=2)).norm) is torch.nn.GroupNorm
    assert [tuple(out.shape) for out in SimpleFeaturePyramid(8)(torch.rand(1, 8, 3, 3))] == [
        (1, 256, side, side) for side in (12, 6, 3, 2, 1)
    ]
    for neck, conv, fans in (
        (MapAdapter([24], [40]), lambda neck: neck.convs[0], 64),
        (SimpleFeaturePyramid(24, 40), lambda neck: neck.levels[2].lateral, 64),
    ):
        neck.init_weights()
        weight = conv(neck).weight.detach()
        bound = (6 / fans) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    mine = dict(type='Constant', layer='Conv2d', val=2.0)
    necks = [
        MapAdapter([2], [3], init_cfg=mine),
        SimpleFeaturePyramid(4, 3, init_cfg=mine),
        ConvProjectionNeck(6, init_cfg=mine),
    ]
    for neck in necks:
        neck.init_weights()
        convs = [module for module in neck.modules() if type(module) is torch.nn.Conv2d]
        assert convs and all((module.weight == 2).all() for module in convs)


def test_adapters_resize_bilinearly_by_the_areas_of_pixels():
    """A column of 0 and 4, twice as high: 0 1 3 4, as pixels' centres lie."""
    neck = MapAdapter([1], [1, 1, 3], sources=[0, 0, None], scales=[2, 0.5, 1])
    with torch.no_grad():
        for conv in neck.convs[:2]:
            conv.weight.fill_(1)
            conv.bias.fill_(0.5)
    column = torch.tensor([0.0, 4.0]).view(1, 1, 2, 1)
    doubled, halved, nobody = neck([column])
    assert doubled[0, 0, :, 0].tolist() == [0.5, 1.5, 3.5, 4.5] and doubled.shape == (1, 1, 4, 2)
    assert halved.flatten().tolist() == [2.5] and not nobody.any() and nobody.shape == (1, 3, 1, 1)
    assert torch.equal(neck(column)[0], doubled)  # a map alone
    assert neck(column.expand(3, -1, -1, -1))[2].shape == (3, 3, 1, 1)


@pytest.mark.parametrize('how', ['trace', 'export'])
@pytest.mark.filterwarnings('ignore')  # of the tracer, of every look at a size
def test_adapters_resize_in_graphs_at_every_size(how):
    """Rounded up, at sizes other than the recorded one."""
    neck = MapAdapter([2], [2, 1, 3, 2], sources=[0] * 4, scales=[2, 0.5, 1, 0.1]).eval()
    x = torch.randn(2, 2, 16, 17)
    if how == 'trace':
        graph = torch.jit.trace(neck, [x], check_trace=False)
    else:
        sides = {2: torch.export.Dim('rows', min=11), 3: torch.export.Dim('columns', min=11)}
        graph = torch.export.export(neck, (x,), dynamic_shapes=(sides,), strict=False).module()
    for size, expected in (
        ((25, 30), [(50, 60), (13, 15), (25, 30), (3, 3)]),
        ((11, 91), [(22, 182), (6, 46), (11, 91), (2, 10)]),
    ):
        x = torch.randn(2, 2, *size)
        outs = graph(x)
        assert [tuple(out.shape[2:]) for out in outs] == expected
        for out, of_model in zip(outs, neck(x)):
            torch.testing.assert_close(out, of_model)


def test_heads_read_one_output_in_inference_alone():
    """The first as well as any other; in training all are there."""
    x = torch.randn(2, 4, 3, 3)
    for place in (0, 1, 2):
        neck = MapAdapter([4], [5, 6, 7], sources=[0, None, 0], inference_output=place)
        outs = neck.train()([x])
        assert [out.shape[1] for out in outs] == [5, 6, 7]
        assert torch.equal(neck.eval()([x]), outs[place])
    with pytest.raises(ValueError, match=r'^inference_output=3 has to lie in \[0, 2\]$'):
        MapAdapter([4], [5, 6, 7], sources=[0, 0, None], inference_output=3)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (
            lambda: MapAdapter([4, 8], [6], sources=[0, 1]),
            'sources=(0, 1) and scales=(1.0,) have to have one entry for each of the 1 out_channels, and sources have '
            'to lie in [0, 1]',
        ),
        (
            lambda: MapAdapter([4], [6, 6], scales=[1], sources=[0, -1]),
            'sources=(0, -1) and scales=(1,) have to have one entry for each of the 2 out_channels, and sources have '
            'to lie in [0, 0]',
        ),
        *(
            (
                lambda sources=sources, scales=scales: MapAdapter([4, 4], [6, 6], sources=sources, scales=scales),
                f'sources={sources} and scales={scales} have to have one entry for each of the 2 out_channels, and '
                'sources have to lie in [0, 1]',
            )
            for sources, scales in (
                ((0, -1), (1, 1)),
                ((0,), (1, 1)),
                ((0, 1, 1), (1, 1)),
                ((0, 1), (1,)),
                ((0, 1), (1, 1, 1)),
                ((0,), (1,)),
                ((0, 2), (1, 1)),
            )
        ),
        (lambda: MapAdapter([4], [6], inference_output=-1), 'inference_output=-1 has to lie in [0, 0]'),
        (lambda: MapAdapter([4, 8], [6, 6])(torch.rand(1, 4, 2, 2)), 'feats have the widths (4,), in_channels=(4, 8)'),
        (lambda: SimpleFeaturePyramid(8, 6, 3), 'num_outs=3 has to be 4 or 5'),
        (lambda: SimpleFeaturePyramid(0), 'in_channels=0 has to be a multiple of 4'),
        (
            lambda: SimpleFeaturePyramid(8)(torch.rand(1, 4, 2, 2)),
            'feats: the map has the shape (1, 4, 2, 2); in_channels=8 allows (B, 8, H, W)',
        ),
        (
            lambda: SimpleFeaturePyramid(8)(torch.rand(1, 8, 4)),
            'feats: the map has the shape (1, 8, 4); in_channels=8 allows (B, 8, H, W)',
        ),
        (
            lambda: SimpleFeaturePyramid(8)(torch.rand(1, 8, 2, 2), image_size=[32, 33]),
            'image_size=(32, 33) does not have a map of (2, 2) at stride 16',
        ),
        (
            lambda: ConvProjectionNeck(6)(torch.rand(1, 6)),
            'feats: the map has the shape (1, 6); in_channels=6 allows (B, 6, H, W)',
        ),
    ],
)
def test_messages_name_the_argument_its_value_and_what_is_allowed(build, message):
    with pytest.raises(ValueError) as error:
        build()
    assert str(error.value) == message
