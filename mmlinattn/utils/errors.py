# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Errors that a user can put right, and their one-line messages. Below every other module of the package."""

import sys
from contextlib import suppress


class RunError(RuntimeError):
    """A run cannot go on, and its user can put that right.

    The message is complete without the traceback: ``tools/*.py`` print it alone and exit with
    status 1.
    """


class CheckpointError(RunError):
    """A checkpoint cannot be found, read, trusted, recognised or fetched; its message is one printable line."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The named checkpoint does not exist; a FileNotFoundError too, as MMEngine raises."""


def printable(text: object) -> str:
    """``text`` in one line without control characters, which would reach the terminal from inside a file."""
    line = ' '.join(str(text).split())
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def described(error: BaseException) -> str:
    """An error of any kind as ``Class: reason``, without the quotes that a KeyError puts around its reason."""
    reason = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return f'{type(error).__name__}: {reason}' if reason else type(error).__name__


def say_last(line: str) -> None:
    """Print the last line of a run to stderr, after flushing stdout, even if stdout is closed (``>&-``) or its reader
    is gone."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
