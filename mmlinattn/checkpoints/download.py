# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Fetching a checkpoint file once per machine, whole or not at all."""

import http.client
import logging
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Optional

from mmengine.logging import print_log
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from ..utils import locked, written_whole
from ..utils.errors import CheckpointError
from ..version import __version__
from .safe import load_file

TIMEOUT = 30  # seconds without a byte from the server
RETRY_WAITS = (1.0, 4.0)  # seconds before the second and the third attempt
_CHUNK = 1 << 20  # bytes


class _LinkError(Exception):
    """The server could not be reached, refused, or stopped short of what it had announced."""

    def __init__(self, reason: str, may_pass: bool = True):
        super().__init__(reason)
        self.may_pass = may_pass  # whether another attempt may succeed


def fetch(link: str, path: Path, progress: Optional[bool] = None) -> None:
    """Download ``link`` to ``path`` unless a file is there already.

    The file appears at ``path`` whole, and only after the safe loader has read it: a broken
    transfer or an error page is never kept. Of the processes of one machine one downloads and the
    others wait for it.

    Args:
        link: an http or https link.
        path: where the file belongs; a file put there by hand is taken as it is.
        progress: show a progress bar. Defaults to whether stderr is a terminal.

    Raises:
        CheckpointError: the link cannot be reached, its content is no checkpoint, or the file
            cannot be written; in one line with the link and ``path``.
    """
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f'.{path.name}.lock'), f'downloads {path.name}'):
            if not path.exists():
                _fetch(link, path, sys.stderr.isatty() if progress is None else progress)
    except OSError as error:
        raise CheckpointError(f'cannot save {link} as {path}: {error.strerror or error}') from error


def _fetch(link: str, path: Path, progress: bool) -> None:
    print_log(f'Downloading {link} to {path}', logger='current')
    # Without a working lock (some network drives) two processes may get here: each has a part file of its own.
    with written_whole(path) as file:
        _download_with_retries(link, file, path, progress)
        file.flush()
        try:
            load_file(file.name)
        except CheckpointError as error:
            reason = str(error).replace(file.name, 'what it sent')
            raise CheckpointError(
                f'{link} did not send a usable checkpoint: {reason}; nothing was kept. '
                f'Fetch the file by other means and put it at {path}'
            ) from error


def _download_with_retries(link: str, file: BinaryIO, path: Path, progress: bool) -> None:
    for wait in (*RETRY_WAITS, None):
        try:
            file.seek(0)
            file.truncate()
            return _download(link, file, progress)
        except _LinkError as error:
            if wait is None or not error.may_pass:
                raise CheckpointError(
                    f'cannot download {link} ({error}); check the connection, or fetch the file '
                    f'by other means and put it at {path}'
                ) from error
            print_log(f'{link}: {error}; trying again in {wait:g} s', 'current', level=logging.WARNING)
        time.sleep(wait)


def _download(link: str, file: BinaryIO, progress: bool) -> None:
    columns = ('{task.description}', BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _network(_open, link) as response:
        length = response.headers.get('Content-Length')
        total = int(length) if length and length.isdigit() else None
        received = 0
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task(os.path.basename(link), total=total)
            while chunk := _network(response.read, _CHUNK):
                file.write(chunk)
                received += len(chunk)
                bar.update(task, completed=received)
    if total is not None and received != total:
        raise _LinkError(f'the transfer broke off after {received} of {total} bytes')


def _open(link: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(link, headers={'User-Agent': f'mmlinattn/{__version__}'})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _network(call: Callable[..., Any], *args: Any) -> Any:
    """Call something that talks to the server; its errors, unlike the disk's, are the link's."""
    try:
        return call(*args)
    except urllib.error.HTTPError as error:
        may_pass = error.code >= 500 or error.code in (408, 429)
        raise _LinkError(f'HTTP {error.code} {error.reason}', may_pass) from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, 'reason', error)) or type(error).__name__
        raise _LinkError(reason) from error
    except ValueError as error:
        raise _LinkError(str(error), may_pass=False) from error
