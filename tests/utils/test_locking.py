# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""One process at a time, and nobody waits for the dead."""

import errno
import threading

import filelock
import pytest

from mmlinattn.checkpoints import download
from mmlinattn.utils import locked, locking


@pytest.fixture
def held(tmp_path):
    """The file of a lock that is somebody else's until it is closed, as the system does with files of the dead."""
    fcntl = pytest.importorskip('fcntl')
    with open(tmp_path / '.x.pth.lock', 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@pytest.fixture
def said(monkeypatch):
    """What is logged, and an event for the first of it."""
    lines, first = [], threading.Event()
    monkeypatch.setattr(locking, 'print_log', lambda message, *_, **__: lines.append(message) or first.set())
    return lines, first


def test_a_second_process_says_so_and_waits_until_the_first_ends(tmp_path, held, said):
    """It is a download, and what the first process has left is not fetched again: there is no server."""
    lines, first = said
    path, failures = tmp_path / 'x.pth', []

    def fetch():
        try:
            download.fetch('http://127.0.0.1:9/x.pth', path)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert first.wait(60) and thread.is_alive()
    assert lines == [f'another process downloads x.pth now: waiting for it (its lock: {held.name})']
    path.write_bytes(b'whole')
    held.close()
    thread.join(60)
    assert not thread.is_alive() and not failures and path.read_bytes() == b'whole'


def test_a_lock_that_nobody_is_to_wait_for(held, said):
    """It ends with the process or the work that holds it, by an error too, which goes on."""
    with (
        pytest.raises(BlockingIOError, match='another process writes x now'),
        locked(held.name, 'writes x', wait=False),
    ):
        raise AssertionError('two at once')
    held.close()
    for _ in range(2):
        with pytest.raises(OSError, match='disk full'), locked(held.name, 'writes x', wait=False):
            raise OSError(errno.ENOSPC, 'disk full')  # not one of the lock's own
    assert said[0] == []


@pytest.mark.parametrize('error', [OSError(errno.ENOLCK, 'no locks'), NotImplementedError('no flock')], ids=repr)
def test_a_drive_without_locks_is_worked_on_with_a_warning(tmp_path, monkeypatch, said, error):
    def acquire(self, timeout=None):
        raise error

    monkeypatch.setattr(filelock.FileLock, 'acquire', acquire)
    with locked(tmp_path / 'x.lock', 'writes x'):
        pass
    assert said[0] == [f'{tmp_path}/x.lock: this drive has no locks: run one at a time']
