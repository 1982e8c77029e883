# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Make a config from a folder with a user's images and annotations."""

from .making import make_config
from .settings import ConfigArgs

__all__ = ['ConfigArgs', 'make_config']
