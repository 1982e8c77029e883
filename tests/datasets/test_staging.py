# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import errno
import os

import filelock
import pytest

from mmlinattn.datasets import DatasetSpec, write_dataset
from mmlinattn.datasets.staging import LOCK


def test_a_data_set_is_written_by_one_process(tmp_path):
    lock = filelock.FileLock(tmp_path / LOCK)  # of its own, as another process's is
    with lock, pytest.raises(BlockingIOError, match='another process is writing it now'):
        write_dataset(tmp_path, DatasetSpec('ade', 2, 1))
    assert write_dataset(tmp_path, DatasetSpec('ade', 2, 1)) is True
    with lock:  # what is there is as it should be: looked at without a lock, as in a folder that one may only read
        assert write_dataset(tmp_path, DatasetSpec('ade', 2, 1)) is False


def test_a_data_set_of_a_read_only_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    write_dataset(tmp_path, DatasetSpec('ade', 2, 1))
    (tmp_path / LOCK).unlink()
    os_open = os.open

    def read_only(path, flags, *args, **kwargs):
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, 'read-only', str(path))
        return os_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, 'open', read_only)  # root may write anywhere: modes do not serve
    assert write_dataset(tmp_path, DatasetSpec('ade', 2, 1)) is False
    with pytest.raises(PermissionError):
        write_dataset(tmp_path, DatasetSpec('ade', 3, 1))
