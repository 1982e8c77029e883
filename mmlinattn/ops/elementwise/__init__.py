# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from torch import Tensor

from .. import forms
from . import reference


def add(x: Tensor, out: Tensor) -> Tensor:
    """``x + out``; in inference, ``out`` is scratch memory of this function and holds the result."""
    return forms.pick(reference, x, out).add(x, out)


def multiply(out: Tensor, factor: Tensor) -> Tensor:
    """``out * factor``, broadcast to the shape of ``out``; in inference, ``out`` is scratch memory of this function and
    holds the result."""
    return forms.pick(reference, out, factor).multiply(out, factor)
