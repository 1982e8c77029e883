# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import contextlib

import torch
from torch import Tensor


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``; the meta device has none and PyTorch raises when asked for it."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor):
    """A context in which operations on the device of ``x`` keep the types they are given."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()
