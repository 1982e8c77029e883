# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the GPU kernels are given; no kernel runs here."""

import importlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlinattn import ops

pytest.importorskip('triton')
compat = importlib.import_module('mmlinattn.ops.triton.compat')
launch = importlib.import_module('mmlinattn.ops.triton.attention_launch')
convolutions = importlib.import_module('mmlinattn.ops.triton.depthwise_op')
attention = importlib.import_module('mmlinattn.ops.triton.attention')
depthwise = importlib.import_module('mmlinattn.ops.triton.depthwise')

MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
PLAIN = {
    'rala': dict(kernel='relu', rotary=torch.randn(6, 2, 2), mask=MASK, weight_scale=0.7, eps=0.3),
    'rala, all tokens alike': dict(weight_scale=None, eps=0.3),
    'inline_attention': dict(scale=0.7, kernel='exp', mask=MASK),
    'linear_attention': dict(kernel='elu', mask=MASK, eps=0.3),
    'focused_attention': dict(
        inverse_scale=torch.rand(8) + 0.5, power=2.5, offset=torch.randn(1, 6, 8), mask=MASK, eps=0.3
    ),
    'focused_attention, without a floor': dict(inverse_scale=torch.rand(8) + 0.5, power=0.5, eps=0.0),
}


@pytest.mark.skipif(compat.INTERPRETED, reason='the interpreter has kernels for these')
@pytest.mark.parametrize('case', PLAIN)
def test_without_kernels_the_plain_form_gets_all_options(case):
    op, options = case.partition(',')[0], PLAIN[case]
    q, k, v = (t.requires_grad_() for t in torch.rand(3, 2, 6, 8))
    results = []
    for function in (getattr(attention, op), getattr(attention, f'{op}_reference')):
        values = v * MASK[..., None] if 'mask' in options else v
        out = function(q, k, values, 2, **options)
        assert 'mmlinattn' not in str(out.grad_fn)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(compat.INTERPRETED, reason='the interpreter has kernels for these')
def test_without_kernels_convolutions_are_pytorchs():
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 1, 3, 3), torch.randn(4)
    plain = torch.nn.functional.conv2d(x, weight, bias, padding=1, groups=4)
    torch.testing.assert_close(depthwise.depthwise_conv2d(x, weight, bias), plain)
    torch.testing.assert_close(depthwise.residual_depthwise_conv2d(x, weight, bias), x + plain)
    for batch in (2, 0):
        each = torch.randn(batch, 4, 3, 3)
        expected = ops.convolution.sum_of_shifts(x[:batch], each)
        torch.testing.assert_close(depthwise.dynamic_depthwise_conv2d(x[:batch], each), expected)


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
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    else:
        assert ours == theirs


SIZES = st.sampled_from([3, 2, 4, 1])


@st.composite
def spoilt(draw, shapes):
    """Shapes of which one, or two, are not what they should be: an axis longer, shorter, of one, or left out."""
    shapes = dict(shapes)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        name = draw(st.sampled_from(list(shapes)))
        shape = list(shapes[name])
        if shape:
            axis = draw(st.integers(0, len(shape) - 1))
            other = draw(st.sampled_from([1, max(0, shape[axis] - 1), shape[axis] + 1, 2 * shape[axis], None]))
            shape[axis : axis + 1] = [] if other is None else [other]
        shapes[name] = tuple(shape)
    return shapes


@st.composite
def calls(draw):
    op = draw(st.sampled_from(['rala', 'inline_attention', 'linear_attention', 'focused_attention']))
    batch, tokens, heads, d, e = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.sampled_from([4, 2, 3])), draw(SIZES)
    keys = tokens if op == 'rala' else draw(SIZES)
    shapes = dict(q=(batch, tokens, heads * d), k=(batch, keys, heads * d), v=(batch, keys, heads * e))
    if draw(st.booleans()):
        shapes['mask'] = (batch, keys)
    if op == 'rala' and draw(st.booleans()):
        shapes['rotary'] = (tokens, d // 2, 2)
    if op == 'focused_attention':
        shapes['inverse_scale'] = (heads * d,)
        if draw(st.booleans()):
            shapes['offset'] = draw(
                st.sampled_from([(batch, keys, heads * d), (1, keys, heads * d), (keys, heads * d)])
            )
    fault = draw(st.sampled_from(['shape'] * 6 + ['type', 'heads', 'kernel', None]))
    dtypes = dict(dict.fromkeys(shapes, torch.float32), mask=torch.bool)
    kernel = draw(st.sampled_from(['relu', 'elu', 'identity']))
    if fault == 'shape':
        shapes = draw(spoilt(shapes))
    elif fault == 'type':
        dtypes[draw(st.sampled_from(list(shapes)))] = draw(st.sampled_from([torch.float64, torch.int64]))
    elif fault == 'heads':
        heads = draw(st.sampled_from([0, -heads, heads + 1]))
    elif fault == 'kernel':
        kernel = draw(st.sampled_from(['focused', 'unheard of']))
    return op, shapes, dtypes, heads, kernel


@settings(max_examples=500, deadline=None, derandomize=True)
@given(calls())
def test_kernels_get_nothing_but_the_shapes_that_they_index(call):
    """Whatever else there is, the plain form broadcasts or refuses."""
    op, shapes, dtypes, heads, kernel = call
    generator = torch.Generator().manual_seed(0)
    tensors = {key: (torch.rand(shape, generator=generator) * 3).to(dtypes[key]) for key, shape in shapes.items()}
    q, k, v = (tensors.pop(key) for key in 'qkv')
    options = dict(tensors)
    if op == 'inline_attention':
        options.update(scale=0.3)
    if op == 'focused_attention':
        options.update(power=2)
    else:
        options.update(kernel=kernel)
    expected = outcome(getattr(attention, f'{op}_reference'), q, k, v, heads, **options)
    with mock.patch.object(compat, 'INTERPRETED', True), mock.patch.object(launch, 'forward', stop):
        ours = outcome(getattr(attention, op), q, k, v, heads, **options)
    if not isinstance(ours, Launched):
        assert_same(ours, expected)
        return
    spec, q, k, v, rotary, mask, offset, scale = ours.args[0]
    (batch, tokens, channels), (_, keys, width), d = q.shape, v.shape, q.shape[-1] // heads
    assert isinstance(expected, torch.Tensor) and expected.shape == (batch, tokens, width)
    assert k.shape == (batch, keys, channels) and v.shape == (batch, keys, width)
    assert channels % heads == 0 and width % heads == 0 and {t.dtype for t in (q, k, v)} == {torch.float32}
    assert rotary is None or (rotary.shape == (tokens, d // 2, 2) and tokens == keys)
    assert mask is None or (mask.shape == (batch, keys) and mask.is_contiguous())
    assert offset is None or (offset.shape == k.shape and (offset.stride(-1) == 1 or channels == 1))
    assert scale is None or (scale.shape == (channels,) and scale.is_contiguous())


@pytest.mark.parametrize('op', list(PLAIN)[:1] + list(PLAIN)[2:5])
def test_right_shapes_are_launched(op):
    options = PLAIN[op]
    q, k, v = torch.rand(2, 6, 24).chunk(3, dim=-1)
    with mock.patch.object(launch, 'forward', stop):
        assert isinstance(outcome(getattr(attention, op), q, k, v, 2, **options), torch.Tensor)  # a CPU
        with mock.patch.object(compat, 'INTERPRETED', True):
            assert isinstance(outcome(getattr(attention, op), q, k, v, 2, **options), Launched)
            assert isinstance(outcome(getattr(attention, op), q[:0], k[:0], v[:0], 2, **_cut(options)), torch.Tensor)
            for dtype, widest in ((torch.float32, 64), (torch.bfloat16, 128)):
                for width, served in ((widest, True), (widest + 2, False)):
                    wide = torch.rand(3, 2, 6, width).to(dtype)
                    given = {**_cut(options), 'rotary': None} if op == 'rala' else _cut(options)
                    if op == 'focused_attention':
                        given.update(inverse_scale=torch.rand(width), offset=None)
                    assert isinstance(outcome(getattr(attention, op), *wide, 1, **given), Launched) == served


def test_odd_heads_cannot_be_turned():
    with mock.patch.object(compat, 'INTERPRETED', True), mock.patch.object(launch, 'forward', stop):
        with pytest.raises(RuntimeError):  # of the plain form
            attention.rala(*torch.rand(3, 2, 6, 6), 2, rotary=torch.rand(6, 1, 2))


def _cut(options):
    return {key: value for key, value in options.items() if key != 'mask'}


@st.composite
def convolution_calls(draw):
    batch, channels, height, width = (draw(SIZES) for _ in range(4))
    of_each, size = draw(st.booleans()), draw(st.sampled_from([3, 5, 7]))
    shapes = dict(x=(batch, channels, height, width), weight=(channels, 1, size, size))
    if of_each:
        shapes['weight'] = (batch, channels, size, size)
    elif draw(st.booleans()):
        shapes['bias'] = (channels,)
    fault = draw(st.sampled_from(['shape'] * 4 + ['type', None]))
    dtypes = dict.fromkeys(shapes, torch.float32)
    if fault == 'type' and not of_each:
        dtypes[draw(st.sampled_from(list(shapes)))] = draw(st.sampled_from([torch.float16, torch.float64]))
    return of_each, draw(spoilt(shapes)) if fault == 'shape' else shapes, dtypes


@settings(max_examples=500, deadline=None, derandomize=True)
@given(convolution_calls())
def test_convolutions_get_nothing_but_the_shapes_that_they_index(call):
    of_each, shapes, dtypes = call
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(shape, generator=generator).to(dtypes[key]) for key, shape in shapes.items()]
    ours, theirs = depthwise.depthwise_conv2d, ops.convolution.depthwise_conv2d_reference
    if of_each:
        *_, height, width = (0, 0, *tensors[1].shape)
        if tensors[1].dim() != 4 or height != width or width % 2 == 0:
            return  # no kernels
        ours, theirs = depthwise.dynamic_depthwise_conv2d, ops.convolution.sum_of_shifts
    expected = outcome(theirs, *tensors)
    with mock.patch.object(compat, 'INTERPRETED', True), mock.patch.object(convolutions, 'op', stop):
        ours = outcome(ours, *tensors)
    if not isinstance(ours, Launched):
        assert_same(ours, expected)
        return
    x, weight, bias, *_ = ours.args[0]
    assert isinstance(expected, torch.Tensor) and expected.shape == x.shape
    assert weight.shape == (len(x) if of_each else 1, x.shape[1], *weight.shape[2:])
    assert weight.shape[2:] in ((3, 3), (5, 5)) and (bias is None or bias.shape == x.shape[1:2])
