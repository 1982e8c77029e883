# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import sys
from contextlib import suppress

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


def say_last(line: str) -> None:
    """The last line of a run, on stderr after all that stdout has. Who reads stdout may have gone first, or be nobody
    (``>&-``), and the line is said all the same.

    Args:
        line (str): Without its end.
    """
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
