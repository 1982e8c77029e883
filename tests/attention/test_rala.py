# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The linear-cost forms against their quadratic twins: values and gradients, in float64."""

import math

import pytest
import reference
import torch

from mmlinattn import ops
from mmlinattn.layers import rotary_table
from mmlinattn.ops import rotate

HEIGHT, WIDTH, HEADS, DIM = 3, 5, 2, 8
SIZE = (HEIGHT, WIDTH)
GRIDS = {'rotary': SIZE, 'plain': None}


def rala(q, k, v, kernel='elu', rotary=None, mask=None, weight_scale=1.0):
    return reference.call_by_head(ops.rala, q, k, v, kernel, rotary, mask, weight_scale)


def tokens(*, values=DIM, batch=2):
    shapes = (DIM, DIM, values)
    return [torch.randn(batch, HEADS, HEIGHT * WIDTH, d, dtype=torch.float64, requires_grad=True) for d in shapes]


def table(size):
    return None if size is None else rotary_table(*size, DIM, dtype=torch.float64)


@pytest.mark.parametrize('size', GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize('weight_scale', [None, 1.0, DIM**-0.5], ids='plain paper release'.split())
@pytest.mark.parametrize('kernel', ['elu', 'relu', 'softmax'])
def test_rala_equals_its_quadratic_twin(kernel, weight_scale, size):
    q, k, v = tokens(values=6)
    fast = rala(q, k, v, kernel, table(size), None, weight_scale)
    attention = reference.rala_map(reference.kernel(q, kernel), reference.kernel(k, kernel), size, weight_scale)
    reference.assert_twins(fast, attention @ v, (q, k, v))


@pytest.mark.parametrize('weight_scale', [None, 0.5])
@pytest.mark.parametrize('size', GRIDS.values(), ids=GRIDS)
def test_rala_with_a_mask_is_rala_on_the_real_tokens_alone(size, weight_scale):
    """The last columns of the first item and the last row of the second are padding."""
    leaves = tokens()
    q, k, v = leaves
    mask = torch.ones(2, HEIGHT, WIDTH, dtype=torch.bool)
    mask[0, :, 3:] = False
    mask[1, 2] = False
    masked = (v.transpose(1, 2) * mask.flatten(1)[..., None, None]).transpose(1, 2)
    fast = rala(q, k, masked, 'elu', table(size), mask.flatten(1), weight_scale)
    for item, (height, width) in enumerate(((HEIGHT, 3), (2, WIDTH))):
        real = mask[item].flatten()
        part = [t[item : item + 1, :, real] for t in (reference.kernel(q, 'elu'), reference.kernel(k, 'elu'), v)]
        grid = None if size is None else (height, width)
        literal = reference.rala_map(part[0], part[1], grid, weight_scale) @ part[2]
        reference.assert_twins(fast[item : item + 1, :, real], literal, leaves)


def test_rows_of_the_plain_map_sum_to_one():
    """Without rotary encoding RALA averages values: constant values come back (up to eps)."""
    q, k, _ = tokens()
    ones = torch.ones(2, HEADS, HEIGHT * WIDTH, 3, dtype=torch.float64)
    out = rala(q, k, ones)
    torch.testing.assert_close(out, ones, rtol=1e-5, atol=0)


def test_relu_queries_of_zero_give_zero_not_nan():
    """A dead query has a normaliser of eps alone."""
    q, k, v = tokens()
    out = rala(-q.abs(), k, v, 'relu')
    assert (out == 0).all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('autocast', [False, True], ids=['half', 'autocast'])
@pytest.mark.parametrize('size', [1.0, 1e-3], ids=['', 'small values'])
def test_rala_in_half_precision_on_a_detection_map(dtype, autocast, size):
    """Stage 1 at 1333x800: N = 66,800 exceeds float16, 1/N is below its normal numbers."""
    height, width = 200, 334
    q, k, v = (torch.randn(1, 1, height * width, 16) for _ in range(3))
    q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, size * v))
    rotary = rotary_table(height, width, 16)
    with torch.autocast('cpu', dtype, enabled=autocast):
        out = rala(q, k, v, 'elu', rotary, weight_scale=0.25)
    assert out.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = rala(*wide, 'elu', rotary.double(), weight_scale=0.25)
    resolution = torch.finfo(dtype).eps
    assert (out - exact).abs().max() < 16 * resolution * exact.abs().max()
    # a sum over the tokens, as scaled losses give it: gradients of queries do not fall with N
    probe = torch.randn_like(exact) / size
    ours = torch.autograd.grad((out.double() * probe).sum(), (q, k, v))
    theirs = torch.autograd.grad((exact * probe).sum(), wide)
    for mine, other in zip(ours, theirs):
        assert mine.isfinite().all()
        assert (mine - other).norm() < 16 * resolution * other.norm()


def test_rotate_turns_pairs_by_the_angles_of_the_release():
    x = torch.randn(2, HEADS, HEIGHT * WIDTH, DIM, dtype=torch.float64)
    turned = reference.turn(x, *SIZE)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotate(x, table(SIZE)), expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rotate_takes_every_layout_and_type(dtype):
    """Columns of a wider tensor from an odd one on, rows that are columns, tables whose pairs lie apart."""
    x, turn = torch.randn(2, 3, 6, 8).to(dtype), rotary_table(2, 3, 8, dtype=dtype)
    with ops.use('reference'):
        expected = rotate(x, turn)
    wide = torch.zeros(2, 3, 6, 10, dtype=dtype)
    wide[..., 1:9] = x
    odd = torch.zeros(2, 3, 6, 9, dtype=dtype)
    odd[..., :8] = x
    across = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    apart = turn.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for tokens in (x, wide[..., 1:9], odd[..., :8], across):
        for angles in (turn, apart):
            found = rotate(tokens, angles)
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected)


def test_rotate_in_half_precision_uses_the_angles_of_float32():
    """Column 333 is no number of bfloat16; its angle has to be. The result alone is rounded: below 2, by 1 / 256."""
    x = torch.ones(1, 1, 334, DIM, dtype=torch.bfloat16)
    turned = rotate(x, rotary_table(1, 334, DIM))
    exact = rotate(x.double(), rotary_table(1, 334, DIM, dtype=torch.float64))
    assert turned.dtype == torch.bfloat16
    assert (turned - exact).abs().max() < 0.004


def test_rotated_products_depend_on_the_offset_only():
    """What makes it a relative encoding: shifting both tokens leaves their product."""
    q, k = torch.randn(2, DIM, dtype=torch.float64)
    fill = rotate(q.expand(1, 1, HEIGHT * WIDTH, DIM), table(SIZE))[0, 0].unflatten(0, SIZE)
    keys = rotate(k.expand(1, 1, HEIGHT * WIDTH, DIM), table(SIZE))[0, 0].unflatten(0, SIZE)
    here = (fill[0, 1] * keys[1, 3]).sum()
    torch.testing.assert_close((fill[1, 2] * keys[2, 4]).sum(), here)
    assert abs((fill[1, 2] * keys[2, 3]).sum() - here) > 1e-3


def test_the_table_of_angles():
    """Rows turn the first half of the pairs, columns the second; the last of a half by ``1 / base`` a token."""
    table = rotary_table(2, 3, 8, dtype=torch.float64, base=100.0)
    assert table.shape == (6, 4, 2) and table.dtype == torch.float64
    angles = torch.tensor(
        [[row, row / 100, column, column / 100] for row in range(2) for column in range(3)], dtype=torch.float64
    )
    torch.testing.assert_close(table, torch.stack((angles.cos(), angles.sin()), dim=-1))
    turned = rotary_table(50, 1, 16, dtype=torch.float64, base=100.0)[49, :4, 1]
    expected = [math.sin(49 * 100 ** (-i / 3)) for i in range(4)]  # float32 would not hold them
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    default = rotary_table(2, 1, 8)
    assert default.dtype == torch.float32
    torch.testing.assert_close(default[1, :, 1], torch.tensor([1, 1e-4, 0, 0]).sin())
    narrow = rotary_table(1, 3, 4)  # one angle for each axis
    torch.testing.assert_close(narrow[2, :, 0], torch.tensor([0.0, 2]).cos())


@pytest.mark.parametrize('head_dim', [2, 6, 30])
def test_rotary_needs_a_head_width_that_is_a_multiple_of_four(head_dim):
    with pytest.raises(ValueError, match=f'head_dim={head_dim} has to be a multiple of 4'):
        rotary_table(2, 2, head_dim)
