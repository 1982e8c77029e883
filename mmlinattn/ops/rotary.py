# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor

from . import dispatch


def rotate(x: Tensor, table: Tensor, inplace: bool = False) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Source: Su et al. 2021 (RoFormer), Eq. 34; in two dimensions in the released RALA.

    Args:
        x (Tensor): (B, heads, N, d).
        table (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`mmlinattn.layers.rotary_table`.
        inplace (bool): ``x`` may be overwritten.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    # half precision is rotated by angles in float32, and there are no mixed complex products, nor any of bfloat16
    as_complex = x.dtype == table.dtype and x.dtype in (torch.float32, torch.float64)
    if not as_complex or dispatch.is_plain(x) or not (_pairs_lie_together(x) and _pairs_lie_together(table)):
        return rotate_reference(x, table)
    # a product of complex numbers is one pass over the memory
    pairs, turn = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)


def rotate_reference(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.unbind(-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2).to(x.dtype)


def _pairs_lie_together(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and not any(stride % 2 for stride in (*strides, x.storage_offset()))
