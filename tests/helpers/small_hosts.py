# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Former name of :mod:`helpers.small_backbones`."""

from helpers.small_backbones import ARCHS, build  # noqa: F401
