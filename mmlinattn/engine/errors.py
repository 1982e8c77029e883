# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
__all__ = ['RunError']


class RunError(RuntimeError):
    """A run cannot go on, and its user can put that right.

    The message is complete without the traceback: ``tools/*.py`` print it alone and exit with
    status 1.
    """
