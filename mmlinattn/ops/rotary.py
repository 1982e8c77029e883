# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rotary position encoding."""

import torch
from torch import Tensor

from . import dispatch
from .tensors import unflatten, widened

_HALF = (torch.float16, torch.bfloat16)


def rotary_table(
    height: int, width: int, head_dim: int, device=None, dtype: torch.dtype = torch.float32, base: float = 10000.0
) -> Tensor:
    """Two-dimensional rotary position encoding of the released RAVLT.

    The first half of a head turns with the row, the second half with the column, by ``1 / base ** linspace(0, 1,
    head_dim / 4)`` radians a token, index 0 at the top left. Channel pairs are interleaved: (0, 1), (2, 3), ...

    Args:
        height, width (int): Grid.
        head_dim (int): Channels of a head, a multiple of 4.
        device, dtype: Of the result; the angles themselves are computed in ``dtype``.
        base (float): Largest wavelength over 2 pi, in tokens.

    Returns:
        Tensor: (height * width, head_dim / 2, 2): cos and sin of each channel pair's angle.

    Raises:
        ValueError: If ``head_dim`` is no multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(
            f'rotary encoding: head_dim={head_dim} has to be a multiple of 4 (change num_heads or rotary=False)'
        )
    speed = base ** -torch.linspace(0, 1, head_dim // 4, device=device, dtype=dtype)
    positions = torch.cat([torch.arange(size, device=device, dtype=dtype) for size in (height, width)])
    angles = positions[:, None] * speed
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1)
    rows, columns = turns[:height], turns[height:]
    halves = (rows[:, None].expand(height, width, -1, -1), columns[None].expand(height, width, -1, -1))
    return torch.cat(halves, dim=2).flatten(0, 1)


def rotate(x: Tensor, table: Tensor, inplace: bool = False) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Source: Su et al. 2021 (RoFormer), Eq. 34; in two dimensions in the released RALA.

    Args:
        x (Tensor): (..., B, heads, N, d).
        table (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`rotary_table`.
        inplace (bool): ``x`` may be overwritten; without gradients.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    by_reference = not inplace and (dispatch.needs_reference(x) or (table.requires_grad and torch.is_grad_enabled()))
    # half precision is rotated by angles in float32, and there are no mixed complex products, nor any of bfloat16
    if not by_reference and x.dtype in _HALF and table.dtype == torch.float32:
        if not inplace:
            has_gradient = torch.is_grad_enabled() and x.requires_grad
            return rotate(x.to(table.dtype), table, inplace=not has_gradient).to(x.dtype)
        for rows, wide in widened(x):
            rotate(wide, table[rows], inplace=True)
        return x
    as_complex = x.dtype == table.dtype and x.dtype in (torch.float32, torch.float64)
    if by_reference or not as_complex or not (_pairs_lie_together(x) and _pairs_lie_together(table)):
        turned = rotate_reference(x, table)
        return x.copy_(turned) if inplace else turned
    # a product of complex numbers is one pass over the memory
    pairs, turn = _as_complex(x), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    first, second = unflatten(x, -1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def backwards(table: Tensor) -> Tensor:
    """The table of the opposite angles, contiguous."""
    return torch.stack((table[..., 0], -table[..., 1]), dim=-1)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _pairs_lie_together(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and not any(stride % 2 for stride in (*strides, x.storage_offset()))
