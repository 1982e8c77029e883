# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from functools import partial

import pytest
import torch
from mmengine.registry import MODELS
from torch.nn import functional as F

from mmlinattn.necks import ConvProjectionNeck, MapAdapter, SimpleFeaturePyramid


def pyramid(**options):
    return MODELS.build(dict(dict(type='SimpleFeaturePyramid', in_channels=8, out_channels=6), **options))


@pytest.mark.parametrize(('height', 'width'), [(64, 96), (80, 48), (48, 32)])
def test_levels_have_the_sizes_of_a_convolutional_pyramid(height, width):
    neck, x = pyramid(), torch.randn(2, 8, height // 16, width // 16)
    outs = neck([torch.zeros(1, 5, 3, 4), x])
    for out, other, stride in zip(outs, neck(x), (4, 8, 16, 32, 64), strict=True):
        assert out.shape == (2, 6, -(-height // stride), -(-width // stride)) and torch.equal(out, other)
    assert len(pyramid(num_outs=4)(x)) == 4


def test_levels_are_those_of_vitdet():
    """Compare with Fig. 2: transposed convolutions up, max-pooling down, then 1x1 and 3x3 convolutions with norms."""
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
    pooled = F.pad(x, (0, 1, 0, 1), value=-torch.inf).unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    expected = [finish(up(F.gelu(norm(up(x, stem[0]), stem[1])), stem[3]), four), finish(up(x, eight[0]), eight)]
    expected += [finish(x, sixteen), finish(pooled, thirty_two)]
    expected.append(expected[-1][..., ::2, ::2])
    torch.testing.assert_close(neck(x), tuple(expected))


def test_initial_weights():
    """Expect uniform Xavier for convolutions, bounded by sqrt(6 / (fan in + fan out)), unless ``init_cfg`` is given."""
    for kind in (partial(MapAdapter, [24], [40]), partial(SimpleFeaturePyramid, 24, 40)):
        for init_cfg in (None, dict(type='Constant', layer='Conv2d', val=2.0)):
            neck = kind(init_cfg=init_cfg)
            neck.init_weights()
            conv = next(m for m in neck.modules() if type(m) is torch.nn.Conv2d and m.in_channels == 24)
            bound = (6 / 64) ** 0.5
            assert init_cfg is not None or 0.95 * bound < conv.weight.abs().max() <= bound
            assert init_cfg is None or (conv.weight == 2).all()


def test_adapters_resize_bilinearly_by_the_areas_of_pixels():
    """Resize a column of 0 and 4 to 0 1 3 4, by pixel centres."""
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
        torch.testing.assert_close(tuple(outs), neck(x))


def test_heads_read_one_output_in_inference_alone():
    x = torch.randn(2, 4, 3, 3)
    for place in (0, 1, 2):
        neck = MapAdapter([4], [5, 6, 7], sources=[0, None, 0], inference_output=place)
        outs = neck.train()([x])
        assert [out.shape[1] for out in outs] == [5, 6, 7]
        assert torch.equal(neck.eval()([x]), outs[place])


PAIR = partial(MapAdapter, [4, 4], [6, 6])
PROJECTION = ConvProjectionNeck(6)
SHAPES = [(PROJECTION, 'in_channels=6', (1, 6)), (PROJECTION, 'in_channels=6', (1, 4, 2, 2))]
SHAPES += [(pyramid(), 'in_channels=8 allows (B, 8, H, W)', shape) for shape in ((1, 4, 2, 2), (1, 8, 4))]
ERRORS = [
    (partial(PAIR, sources=(0, -1)), ['sources=(0, -1)', 'scales=(1.0, 1.0)', '2 out_channels', '[0, 1]']),
    (partial(PAIR, sources=(0, 2)), ['sources=(0, 2)', '[0, 1]']),
    (partial(PAIR, sources=(0,)), ['sources=(0,)', 'scales=(1.0, 1.0)', '2 out_channels']),
    (partial(PAIR, scales=(1, 1, 1)), ['sources=(0, 1)', 'scales=(1, 1, 1)', '2 out_channels']),
    *((partial(PAIR, scales=(1, s)), [f'scales=(1, {s})', 'numbers above 0']) for s in (0, -1, float('nan'))),
    *((partial(PAIR, inference_output=i), [f'inference_output={i}', 'in [0, 1]']) for i in (-1, 2)),
    (partial(PAIR(), torch.rand(1, 4, 2, 2)), ['feats', '(4,)', 'in_channels=(4, 4)']),
    *((partial(pyramid, num_outs=n), [f'num_outs={n}', '4 or 5']) for n in (3, 6)),
    *((partial(pyramid, in_channels=n), [f'in_channels={n}', 'multiple of 4']) for n in (0, 6, '8')),
    *((partial(neck, torch.rand(shape)), ['feats', f'{shape}', allowed]) for neck, allowed, shape in SHAPES),
]


@pytest.mark.parametrize(('build', 'words'), ERRORS, ids=range(len(ERRORS)))
def test_messages_name_argument_value_and_allowed_values(build, words):
    with pytest.raises(ValueError) as error:
        build()
    assert not [word for word in words if word not in str(error.value)] and '\n' not in str(error.value)
