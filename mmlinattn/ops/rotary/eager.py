# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor

from . import reference


def rotate(x: Tensor, table: Tensor, inplace: bool = False) -> Tensor:
    """As the reference; ``inplace``: ``x`` may be overwritten."""
    # half precision is rotated by angles in float32, and there are no mixed complex products, nor any of bfloat16
    if x.dtype != table.dtype or x.dtype not in (torch.float32, torch.float64):
        return reference.rotate(x, table)
    if not (_pairs_lie_together(x) and _pairs_lie_together(table)):
        return reference.rotate(x, table)
    # a product of complex numbers is one pass over the memory
    pairs, turn = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)


def _pairs_lie_together(x: Tensor) -> bool:
    *strides, last = x.stride()
    return last == 1 and not any(stride % 2 for stride in (*strides, x.storage_offset()))
