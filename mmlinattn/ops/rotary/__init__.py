# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor

from .. import forms
from . import reference


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate interleaved channel pairs: ``(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin)``.

    Source: Su et al. 2021 (RoFormer), Eq. 34; in two dimensions in the released RALA.

    Args:
        x (Tensor): (B, heads, N, d).
        table (Tensor): (N, d / 2, 2), cos and sin of each pair's angle, see :func:`mmlinattn.layers.rotary_table`.

    Returns:
        Tensor: As ``x``, in its dtype.
    """
    return forms.pick(reference, x).rotate(x, table)
