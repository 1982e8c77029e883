# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Download checkpoints atomically. Processes on one machine share one download."""

import os
import socket
import sys
from http.client import HTTPException
from pathlib import Path

import torch
from filelock import FileLock
from mmengine.logging import print_log

from ..utils.errors import CheckpointError, described
from .safe import load_file


class DownloadError(CheckpointError):
    """Checkpoint that cannot be downloaded."""


TIMEOUT = 30  # seconds without a byte from the server
HUB = 'https://huggingface.co'


def mirrored(link: str) -> str:
    """Return a link of Hugging Face's hub with the host of ``HF_ENDPOINT`` (a mirror); other links are unchanged."""
    endpoint = os.environ.get('HF_ENDPOINT', '').rstrip('/')
    return f'{endpoint}{link[len(HUB) :]}' if endpoint and link.startswith(f'{HUB}/') else link


def is_offline() -> bool:
    """Return True if ``HF_HUB_OFFLINE`` forbids downloads, read as by Hugging Face's library."""
    return os.environ.get('HF_HUB_OFFLINE', '').upper() in ('1', 'ON', 'YES', 'TRUE')


def fetch(link: str, path: Path) -> None:
    """Download ``link`` to ``path`` unless the file exists, with a progress bar on a terminal.

    The file is kept only if the safe loader can read it: a broken transfer or an error page is removed. One process
    per machine downloads, and the others wait.

    Args:
        link (str): An http or https link.
        path (Path): The target. A file put there by hand is used unchecked.

    Raises:
        DownloadError: The link cannot be reached, its content is no checkpoint, or the file cannot be written. The
            message has the link and ``path``.
    """
    if path.exists():
        return
    mirror = 'set HF_ENDPOINT to a mirror, ' if link.startswith(f'{HUB}/') else ''
    advice = f'check the connection, {mirror}or fetch the file by other means and put it at {path}'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f'.{path.name}.lock')):
            if not path.exists():
                _fetch(link, path)
    except CheckpointError as error:
        raise DownloadError(f'{link} did not send a usable checkpoint: {error}; nothing was kept; {advice}') from error
    except (OSError, ValueError, HTTPException, NotImplementedError) as error:  # the last from a disk without locks
        raise DownloadError(f'cannot download {link} ({described(error)}); {advice}') from error


def _fetch(link: str, path: Path) -> None:
    print_log(f'Downloading {link} to {path}', logger='current')
    part = path.with_name(f'.{path.name}.part')
    patience = socket.getdefaulttimeout()  # torch.hub sets no timeout
    socket.setdefaulttimeout(TIMEOUT)
    try:
        torch.hub.download_url_to_file(link, str(part), progress=sys.stderr.isatty())
        load_file(part, name='the download')
        os.replace(part, path)
    finally:
        socket.setdefaulttimeout(patience)
        part.unlink(missing_ok=True)
