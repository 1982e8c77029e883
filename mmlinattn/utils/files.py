# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Union

PACKAGE = Path(__file__).resolve().parents[1]


def project_files(name: str) -> Path:
    """Return the path of ``configs``, ``tools`` or ``model-index.yml``, in the installed package or in the checkout.

    Raises:
        FileNotFoundError: The file is in neither.
    """
    for root in (PACKAGE / '.mim', PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(
        f'{name} is neither in {PACKAGE / ".mim"} nor in {PACKAGE.parent}: install mmlinattn with pip'
    )


def link_checkout() -> None:
    """Link ``configs`` and ``model-index.yml`` into ``mmlinattn/.mim`` of a checkout that is not installed.

    MMEngine looks up ``mmlinattn::`` addresses in that folder. Installation with pip creates the folder; the links make
    the addresses work without installation. If the folder cannot be written to, nothing is done.
    """
    for name in ('configs', 'model-index.yml'):
        link = PACKAGE / '.mim' / name
        if not link.exists() and (PACKAGE.parent / name).exists():
            with contextlib.suppress(OSError):  # read-only, or another rank was first
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(os.path.join('..', '..', name))


@contextlib.contextmanager
def atomic_write(path: Union[str, 'os.PathLike[str]']) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` only once it is complete and on disk.

    The bytes are written to ``NAME.RANDOM.part`` beside it. On an error, that file is removed and an existing ``path``
    stays. If the process is killed, that file remains.

    Yields:
        BinaryIO: The open file.
    """
    part = f'{os.fspath(path)}.{secrets.token_hex(4)}.part'
    try:
        with open(part, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
