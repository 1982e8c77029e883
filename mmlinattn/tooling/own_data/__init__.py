# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""From a folder of somebody's images to a config that trains on them."""

from .making import ConfigArgs, make_config

__all__ = ['ConfigArgs', 'make_config']
