# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def project_files(name: str) -> Path:
    """``configs``, ``tools`` or ``model-index.yml``: of the installed package, or of the checkout it lies in.

    Raises:
        FileNotFoundError: Neither has it; the message says how an installation gets it.
    """
    for root in (PACKAGE / '.mim', PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(
        f'{name} is neither in {PACKAGE / ".mim"} nor in {PACKAGE.parent}: install mmlinattn with pip'
    )
