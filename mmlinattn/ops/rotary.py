# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rotary position encoding."""

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .tensors import first_order, pair_by_head, split_heads, widened

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
        x (Tensor): (B, heads, N, d).
        table (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`rotary_table`.
        inplace (bool): ``x`` may be overwritten; for CPU backends.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    # half precision is rotated by angles in float32, and there are no mixed complex products, nor any of bfloat16
    as_complex = x.dtype == table.dtype and x.dtype in (torch.float32, torch.float64)
    is_plain = not inplace and dispatch.is_plain(x)
    if x.is_cpu and not is_plain and x.dtype in _HALF and table.dtype == torch.float32:
        if not inplace:
            return rotate(x.to(table.dtype), table, inplace=True).to(x.dtype)
        for rows, wide in widened(x):
            rotate(wide, table[rows], inplace=True)
        return x
    if is_plain or not as_complex or not (_pairs_lie_together(x) and _pairs_lie_together(table)):
        return rotate_reference(x, table)
    # a product of complex numbers is one pass over the memory
    pairs, turn = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)


def rotate_by_head(q: Tensor, k: Tensor, num_heads: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, N, num_heads * d) as (B, num_heads, N, d), rotated. In one pass where they lie side by
    side."""
    pair = None
    if q.is_cpu and q.dtype not in _HALF and not (table.requires_grad or dispatch.is_plain(q, k, table)):
        pair = pair_by_head(q, k, num_heads) if q.dtype == table.dtype and _pairs_lie_together(table) else None
    if pair is None:
        return rotate(split_heads(q, num_heads), table), rotate(split_heads(k, num_heads), table)
    q, k = _RotatedPair.apply(q, k, num_heads, table) if dispatch.records() else rotate(pair, table).chunk(2, dim=1)
    return q, k


class _RotatedPair(torch.autograd.Function):
    """Autograd would copy the gradients by head, and conjugate the table for each."""

    @staticmethod
    def forward(ctx: Any, q, k, num_heads, table):
        ctx.save_for_backward(table)
        ctx.num_heads = num_heads
        pair: Any = pair_by_head(q, k, num_heads)
        return rotate(pair, table).chunk(2, dim=1)

    @first_order
    def backward(ctx: Any, *grads):
        (table,) = ctx.saved_tensors
        batch, heads, tokens, width = grads[0].shape
        whole = grads[0].new_empty(batch, tokens, 2 * heads * width)  # which q and k are slices of
        back = torch.view_as_complex(table).conj_physical()
        for grad, place in zip(grads, split_heads(whole, 2 * heads).chunk(2, dim=1)):
            grad = grad if _pairs_lie_together(grad) else grad.contiguous()
            turned = torch.view_as_complex(place.unflatten(-1, (-1, 2)))
            torch.mul(torch.view_as_complex(grad.unflatten(-1, (-1, 2))), back, out=turned)
        return *whole.chunk(2, dim=-1), None, None


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def _pairs_lie_together(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and not any(stride % 2 for stride in (*strides, x.storage_offset()))
