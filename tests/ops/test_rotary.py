# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rotary encodings against complex multiplication."""

import pytest
import torch
from helpers import references
from helpers.attentions import FORMS, form

from mmlinattn import ops
from mmlinattn.layers import rotary_table
from mmlinattn.ops import rotate
from mmlinattn.ops.tokens import split_heads

HEIGHT, WIDTH, DIM = 3, 5, 8


@pytest.mark.parametrize(('size', 'dim', 'base'), [((3, 5), 8, 10000.0), ((1, 334), 4, 10000.0), ((50, 2), 16, 100.0)])
def test_rotate_turns_pairs_by_the_angles_of_the_release(size, dim, base):
    """Half precision cannot represent column 333."""
    x = torch.randn(2, 2, size[0] * size[1], dim, dtype=torch.float64)
    table = rotary_table(*size, dim, dtype=torch.float64, base=base)
    expected = torch.view_as_real(references.rotate(x, *size, base)).flatten(-2)
    torch.testing.assert_close(rotate(x, table), expected, rtol=1e-10, atol=1e-12)
    default = rotary_table(*size, dim)
    torch.testing.assert_close(rotary_table(*size, dim, 'cpu'), default, rtol=0, atol=0)
    assert default.dtype == torch.float32 and default.shape == table.shape == (size[0] * size[1], dim // 2, 2)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_rotate_takes_every_layout_and_type(dtype):
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


@pytest.mark.parametrize('learned', [False, True])
@pytest.mark.parametrize('types', ['float64 float64', 'bfloat16 bfloat16', 'bfloat16 float32', 'float16 float32'])
def test_gradients_of_a_rotation(types, learned):
    dtype, angles = (getattr(torch, name) for name in types.split())
    tokens = torch.randn(2, HEIGHT * WIDTH, 2 * DIM).to(dtype)
    turn = rotary_table(HEIGHT, WIDTH, DIM).to(angles).requires_grad_(learned)
    found = []
    for which in FORMS:
        x = tokens.clone().requires_grad_()
        with form(which):
            out = rotate(split_heads(x, 2), turn)
            total = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
            found.append([out, *torch.autograd.grad(total, [x, turn] if learned else [x])])
    eps = torch.finfo(tokens.dtype).eps  # the reference adds parts of the gradient in half precision
    for fast in found[:-1]:
        torch.testing.assert_close(fast, found[-1], rtol=2 * eps, atol=2 * eps)


def test_rotate_in_place_takes_large_maps_of_several_images():
    """Process images larger than a block."""
    x, table = torch.randn(2, 1, 600 * 500, DIM).bfloat16(), rotary_table(600, 500, DIM)
    torch.testing.assert_close(rotate(x.clone(), table, inplace=True), rotate(x, table))
