# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Make a config from a folder with a user's images and annotations."""

from .data import ConfigArgs
from .making import make_config

__all__ = ['ConfigArgs', 'make_config']
