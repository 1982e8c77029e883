# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Errors that a user can fix, and their one-line messages."""

import sys
from contextlib import suppress


class RunError(RuntimeError):
    """Fault of a run that its user can fix.

    The message is complete without a traceback: ``tools/*.py`` print it alone and exit with status 1.
    """


class CheckpointError(RunError):
    """Checkpoint that cannot be found, read, trusted, recognised or fetched. The message is one printable line."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Checkpoint that does not exist. MMEngine raises FileNotFoundError."""


def printable(text: object) -> str:
    """Return ``text`` in one line, with control characters escaped."""
    line = ' '.join(str(text).split())
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def described(error: BaseException) -> str:
    """Format an error as ``Class: reason``, without the quotes of a KeyError."""
    reason = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return f'{type(error).__name__}: {reason}' if reason else type(error).__name__


def say_last(line: str) -> None:
    """Flush stdout and print the last line of a run to stderr. Closed streams (``>&-``) are ignored."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
