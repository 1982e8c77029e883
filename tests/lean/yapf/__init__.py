# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Stand-in for YAPF in runs with unread logs: MMEngine formats the config seven times a run, a third of a short run."""

__version__ = '0.43.0'
