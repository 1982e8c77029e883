# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""In place of YAPF in runs whose logs nobody reads: MMEngine lays out the config seven times a run, by which a run of
seconds takes a third longer."""

__version__ = '0.43.0'
