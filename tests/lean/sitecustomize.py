# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Raise the threshold of the garbage collector in each Python with this folder on its path: upstream's imports spend a
sixth of their time on it."""

import gc

gc.set_threshold(100_000, 50, 100)
