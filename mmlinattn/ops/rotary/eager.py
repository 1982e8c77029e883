# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import torch
from torch import Tensor

from . import reference


def rotate(x: Tensor, table: Tensor, inplace: bool = False) -> Tensor:
    """As the reference; ``inplace``: ``x`` may be overwritten."""
    if (
        x.dtype != table.dtype
    ):  # half precision is rotated by angles in float32, and there are no mixed complex products
        return reference.rotate(x, table)
    # a product of complex numbers is one pass over the memory
    pairs, turn = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(table)
    return torch.view_as_real(pairs.mul_(turn) if inplace else pairs * turn).flatten(-2)
