# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Errors that a user can fix, and their one-line messages."""

import difflib
import linecache
import sys
from collections.abc import Iterable
from contextlib import suppress
from traceback import walk_tb
from typing import Any, Optional


class RunError(RuntimeError):
    """Error of a run with a cause that the user can remove.

    The message is complete without a traceback: ``tools/*.py`` print only the message and exit with status 1.
    """


class CheckpointError(RunError):
    """Checkpoint that cannot be found, read, trusted, recognised or fetched. The message is one printable line."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Checkpoint that does not exist. It is a FileNotFoundError too, the type that MMEngine raises."""


def printable(text: object) -> str:
    """Return ``text`` in one line, with control characters escaped."""
    line = ' '.join(str(text).split())
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def described(error: BaseException) -> str:
    """Format an error as ``Class: reason``.

    The reason of a KeyError is its key without quotes, and that of an error without a message the line that raised it.
    """
    reason = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if not reason and error.__traceback__:
        *_, (frame, line) = walk_tb(error.__traceback__)
        reason = linecache.getline(frame.f_code.co_filename, line).strip()
    return f'{type(error).__name__}: {reason}' if reason else type(error).__name__


def closest(name: str, names: Iterable[str]) -> Optional[str]:
    """Return the most similar of ``names``, None if none is similar.

    One with the same last part (``coco/bbox_mAP`` for ``bbox_mAP``), or with the same words (``clip_grad`` for
    ``grad_clip``), comes first.
    """

    def words(text: str) -> list[str]:
        return sorted(text.rpartition('/')[2].lower().split('_'))

    names = list(names)
    same = [each for each in names if words(each) == words(name)]
    return next(iter(same or difflib.get_close_matches(name, names, 1)), None)


def meant(name: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"``, of the most similar of ``names``; '' if none is similar."""
    near = closest(name, names)
    return f' Did you mean {near!r}?' if near else ''


def raising_object(error: BaseException) -> str:
    """Return the class name of the module, metric, transform, hook or data set in which an error was raised.

    The name of a module inside the model follows. An error outside of these gives ``'the loop'``.
    """
    kinds = {'Module', 'BaseMetric', 'BaseTransform', 'BaseDataset', 'Dataset', 'Evaluator', 'Visualizer', 'Hook'}
    known: list[Any] = [frame.f_locals.get('self') for frame, _ in walk_tb(error.__traceback__)]
    found = [each for each in known if kinds & {base.__name__ for base in type(each).__mro__}]
    if not found:
        return 'the loop'
    inner, model = found[-1], next((each for each in found if hasattr(each, 'named_modules')), None)
    names = [name for name, module in model.named_modules() if module is inner] if model is not None else []
    return ' '.join([type(inner).__name__, *names[:1]]).rstrip()


def say_last(line: str) -> None:
    """Flush stdout, then print ``line`` to stderr. Closed streams (``>&-``) are ignored."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
