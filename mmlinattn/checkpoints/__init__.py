# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Read checkpoints safely, find published ones by name, and load them into models."""

from ..utils.errors import CheckpointError, CheckpointNotFoundError
from .fit import Fit, compare
from .loading import load_pretrained
from .released import find_released, released_checkpoints
from .safe import load_file
from .schemes import register

__all__ = [
    'CheckpointError',
    'CheckpointNotFoundError',
    'Fit',
    'compare',
    'find_released',
    'load_file',
    'load_pretrained',
    'register',
    'released_checkpoints',
]
