# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from typing import Union

from mmengine.logging import print_log

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def locked(path: Union[str, 'os.PathLike[str]'], work: str, wait: bool = True) -> Iterator[None]:
    """Let one process at a time do something.

    The system drops the lock with the process that holds it, however that ends. The lock file stays: removing it would
    let a process lock a file that is gone. On a drive without locks (some network drives) nobody waits, and a warning
    says so.

    Args:
        path: The lock file; made when missing.
        work: What is done meanwhile, for the message to the one who waits: ``'downloads RAVLT_B.pth'``.
        wait: Wait for a process that holds the lock, after saying so; False raises instead.

    Raises:
        BlockingIOError: Another process holds the lock and ``wait`` is False.
        OSError: The lock file cannot be opened.
    """
    from filelock import FileLock, Timeout  # here: no part of what `import mmlinattn` costs

    lock = FileLock(os.fspath(path))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise BlockingIOError(f'another process {work} now') from None
            print_log(f'another process {work} now: waiting for it (its lock: {os.fspath(path)})', logger='current')
            lock.acquire()
    except (NotImplementedError, OSError) as error:  # older releases of filelock raise the former
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
        print_log(f'{os.fspath(path)}: this drive has no locks: run one at a time', 'current', logging.WARNING)
    try:
        yield
    finally:
        lock.release()
