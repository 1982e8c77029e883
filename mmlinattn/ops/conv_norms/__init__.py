# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from collections.abc import Sequence
from typing import Optional

from torch import Tensor, nn

from .. import forms
from . import reference


def conv_norms(x: Tensor, layers: Sequence[tuple[nn.Conv2d, Optional[nn.Module]]]) -> Tensor:
    """Convolutions, a norm after each, GELU between them.

    Args:
        x (Tensor): (B, C, H, W).
        layers (Sequence): Pairs of a convolution (odd kernel, padding ``k // 2``, groups in a single one only) and its
            norm, or None.

    Returns:
        Tensor: (B, C', H', W').
    """
    return forms.pick(reference, x).conv_norms(x, layers)
