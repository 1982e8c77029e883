# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Sweeps that take hours: upstream configs."""
