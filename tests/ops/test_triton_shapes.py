# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""What the GPU kernels are given; no kernel runs here."""

# ruff: noqa: E402
from unittest import mock

import pytest
import torch

pytest.importorskip('triton')
from mmlinattn.ops.triton import attention, compat
from mmlinattn.ops.triton import attention_launch as launch

HEADS = 2
OPTIONS = {
    'rala': dict(kernel='elu', weight_scale=0.7, eps=0.3),
    'inline_attention': dict(kernel='elu', scale=0.7),
    'linear_attention': dict(kernel='elu', eps=0.3),
    'focused_attention': dict(power=2.5, eps=0.3),
}
every_op = pytest.mark.parametrize('op', OPTIONS)


class Launched(Exception):
    """In place of a kernel's start."""


def stop(*arguments, **options):
    raise Launched(arguments)


def outcome(function, *arguments, **options):
    """What a call gives, or how it ends."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        return error


def given_to_kernels(function, plain_form, *arguments, **options):
    """With what a kernel is started, None where the plain form serves: as it does where there are no kernels."""
    expected = outcome(plain_form, *arguments, **options)
    for has_kernels in (False, True):
        with mock.patch.object(launch, 'forward', stop), mock.patch.object(compat, 'INTERPRETED', has_kernels):
            ours = outcome(function, *arguments, **options)
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, expected, equal_nan=True)
        else:
            may_start = has_kernels and isinstance(expected, torch.Tensor)
            assert type(ours) is (Launched if may_start else type(expected))
    return (*ours.args[0], expected.shape) if isinstance(ours, Launched) else None


def spoiled(shapes):
    """Each axis of each shape longer, shorter, of one, doubled, or left out."""
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            for other in ((size + 1,), (max(0, size - 1),), (1,), (2 * size,), ()):
                yield {**shapes, name: (*shape[:axis], *other, *shape[axis + 1 :])}


def shapes_of(op, batch=3, tokens=2, keys=None, d=4, e=3):
    keys = keys or (tokens if op == 'rala' else 4)
    shapes = dict(q=(batch, tokens, HEADS * d), k=(batch, keys, HEADS * d), v=(batch, keys, HEADS * e))
    if op == 'rala':
        shapes['rotary'] = tokens, d // 2, 2
    if op == 'focused_attention':
        shapes.update(inverse_scale=(HEADS * d,), offset=(1, keys, HEADS * d))
    return dict(shapes, mask=(batch, keys))


def serves(op, shapes, heads=HEADS, dtype=torch.float32, types=None, learns=False, **options):
    """Whether a kernel does, after a look at what it is given."""
    types = {**dict(mask=torch.bool, rotary=torch.float32, inverse_scale=torch.float32), **(types or {})}
    tensors = {name: (torch.rand(shape) * 3).to(types.get(name, dtype)) for name, shape in shapes.items()}
    if learns:
        tensors['rotary'].requires_grad_()
    q, k, v = (tensors.pop(name) for name in 'qkv')
    forms = getattr(attention, op), getattr(attention, f'{op}_reference')
    given = given_to_kernels(*forms, q, k, v, heads, **{**OPTIONS[op], **options, **tensors})
    if given is None:
        return False
    _, q, k, v, rotary, mask, offset, scale, shape = given
    (batch, tokens, channels), (_, keys, width), d = q.shape, v.shape, q.shape[-1] // heads
    exact = (batch, keys, channels), (batch, keys, width), (tokens, d // 2, 2), (batch, keys), k.shape, (channels,)
    assert all(t is None or t.shape == size for t, size in zip((k, v, rotary, mask, offset, scale), exact))
    assert shape == (batch, tokens, width) and channels % heads == width % heads == 0
    assert (op != 'rala' or tokens == keys) and all(t is None or t.is_contiguous() for t in (rotary, mask, scale))
    assert offset is None or offset.stride(-1) == 1 or channels == 1
    return True


@every_op
def test_kernels_get_nothing_but_the_shapes_that_they_index(op):
    """Whatever else there is, the plain form broadcasts or refuses; it gets all options."""
    for sizes in (dict(), dict(batch=1, keys=1), dict(tokens=1, d=1, e=1), dict(batch=1, keys=4)):
        for shapes in spoiled(shapes_of(op, **sizes)):
            serves(op, shapes)


@every_op
def test_which_attentions_have_kernels(op):
    shapes = shapes_of(op)
    assert serves(op, shapes) and serves(op, {name: shapes[name] for name in shapes if name not in ('mask', 'rotary')})
    for dtype, widest in launch.WIDEST_HEAD.items():
        for width in ('d', 'e'):
            assert serves(op, shapes_of(op, **{width: widest}), dtype=dtype)
            assert not serves(op, shapes_of(op, **{width: widest + 2}), dtype=dtype)
    refused = [dict(heads=heads) for heads in (0, -HEADS, HEADS + 1)] + [dict(dtype=torch.float64)]
    refused += [dict(types={name: torch.int64}) for name in ('q', 'k', 'v', 'mask')]
    refused += [dict(power=0.5) if op == 'focused_attention' else dict(kernel='unheard of')]
    for options in refused:
        assert not serves(op, shapes, **options)
    assert not serves(op, shapes_of(op, batch=0))


def test_which_rotations_and_offsets_have_kernels():
    assert not serves('rala', shapes_of('rala'), learns=True) and not serves('rala', shapes_of('rala', d=3))
    assert not serves('rala', {**shapes_of('rala', keys=4), 'rotary': (4, 2, 2)})
    shapes = shapes_of('focused_attention')
    for offset in (shapes['k'], shapes['k'][1:]):
        assert serves('focused_attention', dict(shapes, offset=offset))
