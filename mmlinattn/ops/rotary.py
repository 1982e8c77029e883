# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Rotary position encoding."""

import functools

import torch
from torch import Tensor

from . import dispatch
from .dispatch import with_gradient
from .tokens import arange, copy_pair, empty_pair, is_known, split_heads, split_pair, unflatten, widen_blocks

_HALF = (torch.float16, torch.bfloat16)


def rotary_table(
    height: int, width: int, head_dim: int, device=None, dtype: torch.dtype = torch.float32, base: float = 10000.0
) -> Tensor:
    """Two-dimensional rotary position encoding of the released RAVLT.

    The row of a token rotates the first half of a head's channels, the column the second half. Rotations per step are
    ``1 / base ** linspace(0, 1, head_dim / 4)`` radians, with index 0 at the top left. Channel pairs are interleaved:
    (0, 1), (2, 3), ...

    Args:
        height, width (int): Grid.
        head_dim (int): Channels of a head, a multiple of 4.
        device: Device of the result, or a tensor on it; with a tensor, a trace names no device.
        dtype: Type of the result; the angles themselves are computed in it.
        base (float): Largest wavelength over 2 pi, in tokens.

    Returns:
        Tensor: (height * width, head_dim / 2, 2): cos and sin of each channel pair's angle.

    Raises:
        ValueError: If ``head_dim`` is no multiple of 4.
    """
    if head_dim % 4:
        raise ValueError(
            f'head_dim={head_dim} of the rotary encoding: expected a multiple of 4 (change num_heads or rotary=False)'
        )
    if device is not None and is_known(height, width) and not dispatch.needs_reference():
        length = 2 ** (max(height, width) - 1).bit_length()
        place = device.device if isinstance(device, Tensor) else torch.device(device)
        rows = columns = _cached_turns(length, head_dim, place, dtype, base)
    else:
        like = device if isinstance(device, Tensor) else torch.empty(0, device=device)
        rows, columns = (_turns(size, head_dim, like, dtype, base) for size in (height, width))
    rows, columns = rows[:height], columns[:width]
    halves = (rows[:, None].expand(height, width, -1, -1), columns[None].expand(height, width, -1, -1))
    return torch.cat(halves, dim=2).flatten(0, 1)


def _turns(length: int, head_dim: int, like: Tensor, dtype: torch.dtype, base: float) -> Tensor:
    """Return cos and sin of the rotation at each position along one axis, (length, head_dim / 4, 2)."""
    speed = base ** -(arange(head_dim // 4, like, dtype) / max(head_dim // 4 - 1, 1))
    angles = arange(length, like, dtype)[:, None] * speed
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


@functools.lru_cache(maxsize=64)
def _cached_turns(length: int, head_dim: int, device: torch.device, dtype: torch.dtype, base: float) -> Tensor:
    with torch.inference_mode(False):  # the cached tensor may be made in inference and used in training
        return _turns(length, head_dim, torch.empty(0, device=device), dtype, base)


def rotate(x: Tensor, table: Tensor, inplace: bool = False) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Source: Su et al. 2021 (RoFormer), Eq. 34; in two dimensions in the released RALA.

    Args:
        x (Tensor): (..., B, heads, N, d).
        table (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`rotary_table`.
        inplace (bool): Write the result to ``x``; not for tensors with gradients.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    by_reference = not inplace and table.requires_grad and torch.is_grad_enabled()
    by_reference = by_reference or (not inplace and dispatch.needs_reference(x))
    # half precision is widened for float32 angles: PyTorch has no complex products of mixed types or of bfloat16
    if not by_reference and x.dtype in _HALF and table.dtype == torch.float32:
        if not inplace:
            has_gradient = torch.is_grad_enabled() and x.requires_grad
            return rotate(x.to(table.dtype), table, inplace=not has_gradient).to(x.dtype)
        for rows, wide in widen_blocks(x):
            rotate(wide, table[rows], inplace=True)
        return x
    as_complex = x.dtype == table.dtype and x.dtype in (torch.float32, torch.float64)
    if by_reference or not as_complex or not (_pairs_lie_together(x) and _pairs_lie_together(table)):
        turned = rotate_reference(x, table)
        return x.copy_(turned) if inplace else turned
    # a product of complex numbers is one kernel
    pairs, turn = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2))), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    first, second = unflatten(x, -1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def backwards(table: Tensor) -> Tensor:
    """Return the table of the opposite angles, contiguous."""
    return torch.view_as_real(torch.view_as_complex(table).conj().resolve_conj())


def _pairs_lie_together(x: Tensor) -> bool:
    """Return True if channel pairs are adjacent and aligned in memory, so that a complex view is possible."""
    if x.is_contiguous() and x.shape[-1] % 2 == 0 and x.storage_offset() % 2 == 0:
        return True
    *strides, last = x.stride()
    for stride in (*strides, x.storage_offset()):
        if stride % 2:
            return False
    return last == 1


def rotate_pair(q: Tensor, k: Tensor, table: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Split heads of queries and keys and :func:`rotate` both by one kernel.

    Args:
        q, k (Tensor): (B, N, heads * d).
        table (Tensor): (N, d / 2, 2), see :func:`rotary_table`.
        num_heads (int): Heads that the channels are split into.

    Returns:
        tuple[Tensor, Tensor]: (B, heads, N, d), each in its own dtype.
    """
    together = q.shape == k.shape and q.dtype == k.dtype and not table.requires_grad
    together = together and table.dtype == torch.promote_types(q.dtype, torch.float32)
    op = _rotate_pair if together and q.numel() else _pair
    return op(q, k, table, num_heads=num_heads)


def _pair(q, k, table, num_heads):
    return tuple(rotate(split_heads(x, num_heads), table) for x in (q, k))


def _pair_forward(q, k, table, num_heads):
    pair = split_pair(q, k, num_heads) if q.dtype == table.dtype else None
    if pair is not None:
        both = rotate(pair, table)
    else:
        both = rotate(copy_pair(q, k, num_heads, table.dtype), table, inplace=True)
    return tuple(both.to(q.dtype).unbind()), ()


def _pair_backward(grads, inputs, kept, wanted, num_heads):
    q, k, table = inputs
    both = grads[0].new_empty(2, *grads[0].shape, dtype=table.dtype)
    for place, grad in zip(both, grads):
        place.copy_(grad)
    made, places = empty_pair(q, num_heads)
    places.copy_(rotate(both, backwards(table), inplace=True))
    return *made, None


_rotate_pair = with_gradient(_pair, _pair_forward, _pair_backward)
