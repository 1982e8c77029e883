# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the GPU kernels are given; no kernel runs here."""

import importlib
import random
from unittest import mock

import pytest
import torch

from mmlinattn import ops

pytest.importorskip('triton')
compat = importlib.import_module('mmlinattn.ops.triton.compat')
launch = importlib.import_module('mmlinattn.ops.triton.attention_launch')
convolutions = importlib.import_module('mmlinattn.ops.triton.depthwise_op')
attention = importlib.import_module('mmlinattn.ops.triton.attention')
depthwise = importlib.import_module('mmlinattn.ops.triton.depthwise')

SIZES = (3, 2, 4, 1)


class Launched(Exception):
    """In place of a kernel's start."""


def stop(*arguments, **options):
    raise Launched(arguments)


def outcome(function, *arguments, **options):
    """What a call gives, or how it ends."""
    try:
        return function(*arguments, **options)
    except Launched as launched:
        return launched
    except Exception as error:
        return type(error)


def assert_same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    else:
        assert ours == theirs


def both(function, *arguments, **options):
    """The outcome where kernels serve, and where there are none."""
    with mock.patch.object(launch, 'forward', stop), mock.patch.object(convolutions, 'op', stop):
        for interpreted in (True, False):
            with mock.patch.object(compat, 'INTERPRETED', interpreted):
                yield outcome(function, *arguments, **options)


def spoil(shapes):
    """Make one shape, or two, what they should not be: an axis longer, shorter, of one, or left out."""
    for _ in range(random.choice([1, 1, 2])):
        name = random.choice(list(shapes))
        shape = list(shapes[name]) or [1]
        axis = random.randrange(len(shape))
        other = random.choice([1, max(0, shape[axis] - 1), shape[axis] + 1, 2 * shape[axis], None])
        shape[axis : axis + 1] = [] if other is None else [other]
        shapes[name] = tuple(shape)


def filled(shapes, dtypes):
    return {key: (torch.rand(shape) * 3).to(dtypes[key]) for key, shape in shapes.items()}


def attention_call(op):
    """Tensors and other arguments, and whether a kernel has to serve."""
    fault = random.choice(['shape'] * 6 + ['type', 'heads', 'kernel', 'learns', 'empty', None, None, None])
    batch, tokens, keys, heads = random.choices(SIZES, k=4)
    batch = 0 if fault == 'empty' else batch
    dtype = random.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    d, e = random.choices([4, 2, 3, 1, 64, 66, 128, 130], k=2)
    keys = tokens if op == 'rala' else keys
    shapes = dict(q=(batch, tokens, heads * d), k=(batch, keys, heads * d), v=(batch, keys, heads * e))
    options = dict(kernel=random.choice(['relu', 'elu', 'identity']), eps=random.choice([1e-6, 0.3]))
    turned = op == 'rala' and random.random() < 0.7
    if random.random() < 0.5:
        shapes['mask'] = (batch, keys)
    if turned:
        shapes['rotary'] = (tokens, d // 2, 2)
    if op == 'rala':
        options.update(weight_scale=random.choice([None, 0.7]))
    if op == 'inline_attention':
        options = dict(kernel=options['kernel'], scale=0.7)
    if op == 'focused_attention':
        options = dict(power=random.choice([2, 2.5]), eps=options['eps'])
        shapes['inverse_scale'], whole = (heads * d,), (batch, keys, heads * d)
        if random.random() < 0.5:
            shapes['offset'] = random.choice([whole, (1, *whole[1:]), whole[1:]])
    dtypes = dict(dict.fromkeys(shapes, dtype), mask=torch.bool, rotary=torch.float32, inverse_scale=torch.float32)
    if fault == 'shape':
        spoil(shapes)
    elif fault == 'type':
        dtypes[random.choice(list(shapes))] = random.choice([torch.float64, torch.int64])
    elif fault == 'heads':
        heads = random.choice([0, -heads, heads + 1])
    elif fault == 'kernel':
        options.update({'power': 0.5} if 'power' in options else {'kernel': 'unheard of'})
    tensors = filled(shapes, dtypes)
    if turned:
        tensors['rotary'].requires_grad_(fault == 'learns')
    right = fault is None or (fault == 'learns' and not turned)
    served = right and not (turned and d % 2) and max(d, e) <= (64 if dtype == torch.float32 else 128)
    return heads, tensors, options, None if fault in ('shape', 'type', 'heads') else served


@pytest.mark.parametrize('op', ['rala', 'inline_attention', 'linear_attention', 'focused_attention'])
def test_kernels_get_nothing_but_the_shapes_that_they_index(op):
    """Whatever else there is, the plain form broadcasts or refuses; it gets all options."""
    for _ in range(400):
        heads, tensors, options, served = attention_call(op)
        q, k, v, *_ = tensors.values()
        options.update({key: x for key, x in tensors.items() if key not in 'qkv'})
        expected = outcome(getattr(attention, f'{op}_reference'), q, k, v, heads, **options)
        ours, plain = both(getattr(attention, op), q, k, v, heads, **options)
        assert_same(plain, expected)
        assert served in (None, isinstance(ours, Launched))
        if not isinstance(ours, Launched):
            assert_same(ours, expected)
            continue
        spec, q, k, v, rotary, mask, offset, scale = ours.args[0]
        (batch, tokens, channels), (_, keys, width), d = q.shape, v.shape, q.shape[-1] // heads
        assert isinstance(expected, torch.Tensor) and expected.shape == (batch, tokens, width)
        assert k.shape == (batch, keys, channels) and v.shape == (batch, keys, width)
        assert channels % heads == 0 and width % heads == 0 and len({t.dtype for t in (q, k, v)}) == 1
        assert q.dtype in launch.WIDEST_HEAD and max(d, width // heads) <= launch.WIDEST_HEAD[q.dtype]
        assert op != 'rala' or tokens == keys
        assert rotary is None or rotary.shape == (tokens, d // 2, 2)
        assert mask is None or (mask.shape == (batch, keys) and mask.is_contiguous() and mask.dtype == torch.bool)
        assert offset is None or (offset.shape == k.shape and (offset.stride(-1) == 1 or channels == 1))
        assert scale is None or (scale.shape == (channels,) and scale.is_contiguous())


def convolution_call(of_each):
    batch, channels, height, width = random.choices(SIZES, k=4)
    size = random.choice([3, 5, 7])
    shapes = dict(x=(batch, channels, height, width), weight=(channels, 1, size, size))
    if of_each:
        shapes['weight'] = (batch, channels, size, size)
    elif random.random() < 0.5:
        shapes['bias'] = (channels,)
    fault = random.choice(['shape'] * 4 + ['type', None])
    dtypes = dict.fromkeys(shapes, torch.float32)
    if fault == 'type' and not of_each:
        dtypes[random.choice(list(shapes))] = random.choice([torch.float16, torch.float64])
    if fault == 'shape':
        spoil(shapes)
    return list(filled(shapes, dtypes).values()), size < 7 if fault is None else None


@pytest.mark.parametrize('of_each', [False, True])
def test_convolutions_get_nothing_but_the_shapes_that_they_index(of_each):
    function, plain_form = depthwise.depthwise_conv2d, ops.convolution.depthwise_conv2d_reference
    if of_each:
        function, plain_form = depthwise.dynamic_depthwise_conv2d, ops.convolution.sum_of_shifts
    for _ in range(400):
        tensors, served = convolution_call(of_each)
        *_, height, width = (0, 0, *tensors[1].shape)
        if of_each and (tensors[1].dim() != 4 or height != width or width % 2 == 0):
            continue  # no kernels
        expected = outcome(plain_form, *tensors)
        ours, plain = both(function, *tensors)
        assert_same(plain, expected)
        assert served in (None, isinstance(ours, Launched))
        if not isinstance(ours, Launched):
            assert_same(ours, expected)
            continue
        x, weight, bias, *_ = ours.args[0]
        assert isinstance(expected, torch.Tensor) and expected.shape == x.shape and x.numel()
        assert weight.shape == (len(x) if of_each else 1, x.shape[1], *weight.shape[2:])
        assert weight.shape[2:] in ((3, 3), (5, 5)) and (bias is None or bias.shape == x.shape[1:2])


@pytest.mark.skipif(compat.INTERPRETED, reason='the interpreter has kernels for these')
def test_without_kernels_what_is_added_is_added():
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4)
    plain = torch.nn.functional.conv2d(x, weight, bias, padding=1, groups=4)
    torch.testing.assert_close(depthwise.residual_depthwise_conv2d(x, weight, bias), x + plain)
