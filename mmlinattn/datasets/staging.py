# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""A folder whose content appears all at once, and that knows what it made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..utils import locked

NOTE = '.shapes_dataset.json'
STAGING = '.partial'
LOCK = '.shapes_dataset.lock'
COMMITTING = 'COMMITTING'


class StagedFolder:
    """Fill ``out`` through a hidden folder inside it, then move the content into place.

    The hidden folder is inside ``out``, not beside it, so that ``out`` may be a mount point and
    its parent read-only. A lock, which the system drops with the process, keeps two writers apart.

    Use as a context manager: look at ``is_current``, ``claim``, write below ``staging``, then
    ``commit``. Without a commit nothing is left behind but what was there before.
    ``is_current`` may be asked before entering, too: a folder that is as it should be may be read-only.

    Args:
        out: The folder; made when missing.
        note: JSON-serialisable description of the content, kept in ``out``.

    Raises:
        BlockingIOError: On entering, if another process is writing ``out``.
        OSError: On entering, if ``out`` cannot be made or read.
    """

    def __init__(self, out: Path, note: dict):
        self.out = out
        self.note = note
        self.staging = out / STAGING

    def __enter__(self) -> StagedFolder:
        if self.out.exists() and not self.out.is_dir():
            raise NotADirectoryError(f'{self.out} is a file, not a folder')
        self._made = not self.out.exists()
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(self.out / LOCK, 'is writing it', wait=False))
        return self

    def __exit__(self, *exc_info) -> None:
        if not self._half_moved:
            shutil.rmtree(self.staging, ignore_errors=True)
            with contextlib.suppress(OSError):  # Windows keeps a file that is open; somebody else may write here
                if not (self.out / NOTE).exists():  # a folder that is not ours stays as it was
                    (self.out / LOCK).unlink(missing_ok=True)
                if self._made:
                    self.out.rmdir()
        self._lock.close()

    @property
    def _half_moved(self) -> bool:
        """Whether a run was killed while it moved the content: what is there is ours."""
        return (self.staging / COMMITTING).exists() and not (self.out / NOTE).exists()

    @property
    def is_current(self) -> bool:
        """Whether ``out`` holds what the note describes: all its files, none of them empty, and no others."""
        found = self._read_note()
        return bool(found) and found['content'] == self.note and not any(self._compare(found))

    def claim(self, names: Sequence[str], overwrite: bool) -> None:
        """Make ``staging`` empty, or refuse because ``out`` holds something else.

        Args:
            names: Top-level names in ``out`` that ``commit`` will replace.
            overwrite: Whether to replace them though they were not made by this class.

        Raises:
            FileExistsError: Refused.
        """
        reason = None if overwrite else self._reason_to_refuse(names)
        if reason:
            raise FileExistsError(reason)
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir()

    def _reason_to_refuse(self, names: Sequence[str]) -> str | None:
        if self._half_moved:
            return None
        found = self._read_note()
        if found is None:
            strange = sorted({path.name for path in self.out.iterdir()} - {STAGING, LOCK})
            return f'it has content of unknown origin: {strange[0]}' if strange else None
        strange = [name for name in names if (self.out / name).exists()]
        strange = [name for name in strange if name not in found['names']]
        if strange:
            return f'{strange[0]} in it is of unknown origin'
        is_more, _ = self._compare(found)
        if is_more:
            return 'files were added to the data set in it'
        return None

    def commit(self, names: Sequence[str]) -> None:
        """Replace ``names`` in ``out``, and what an earlier note lists, by those in ``staging``."""
        files = {
            str(Path(folder).relative_to(self.staging)): sorted(content)
            for folder, _, content in os.walk(self.staging)
            if content
        }
        note = dict(content=self.note, names=list(names), files=files)
        old = (self._read_note() or {}).get('names', [])
        (self.staging / NOTE).write_text(json.dumps(note, indent=1) + '\n')
        (self.staging / COMMITTING).touch()
        (self.out / NOTE).unlink(missing_ok=True)
        for name in {*old, *names}:
            path = self.out / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for name in names:
            (self.staging / name).rename(self.out / name)
        (self.staging / NOTE).rename(self.out / NOTE)
        shutil.rmtree(self.staging)

    def _read_note(self) -> dict | None:
        try:
            note = json.loads((self.out / NOTE).read_text())
            return note if note.keys() >= {'content', 'names', 'files'} else None
        except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
            return None

    def _compare(self, note: dict) -> tuple[bool, bool]:
        """Whether the folders hold files that are not noted, and whether they lack some that are."""
        is_more = is_less = False
        for folder, noted in note['files'].items():
            path = self.out / folder
            if folder == '.':  # the files among the names themselves
                files = [self.out / name for name in note['names'] if (self.out / name).is_file()]
            else:
                files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
            if isinstance(noted, int):  # as notes were before they had names
                is_more, is_less = is_more or len(files) > noted, is_less or len(files) < noted
                continue
            is_more = is_more or not {file.name for file in files} <= set(noted)
            is_less = is_less or not {file.name for file in files if file.stat().st_size} >= set(noted)
        return is_more, is_less
