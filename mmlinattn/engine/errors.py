# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
__all__ = ['RunError']


class RunError(RuntimeError):
    """A run cannot go on, and its user can put that right.

    The message is complete without the traceback: ``tools/*.py`` print it alone and exit with
    status 1.
    """

    def __init__(self, message: str):
        # The loader raises the error of a worker again with the worker's traceback as the message.
        if message.startswith('Caught RunError in DataLoader worker'):
            message = message.rpartition('errors.RunError: ')[2].strip()
        super().__init__(message)
