# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run a tool of mmlinattn: ``mmlinattn train mine.py`` is ``python tools/train.py mine.py``.

A module beside the package: ``import mmlinattn`` fails if packages are missing, and the tools report those in one line.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

TOOLS = {
    'train': 'train.py',
    'test': 'test.py',
    'demo': 'demo.py',
    'config': 'make_config.py',
    'swap': 'swap_backbone.py',
    'export': 'export.py',
}
USAGE = f'usage: mmlinattn {{{",".join(TOOLS)}}} [arguments of the tool, --help lists them]'


def tools_folder() -> Path:
    """Return ``tools/`` of the checkout, or its copy in the installed package."""
    spec = find_spec('mmlinattn')
    if spec is None or spec.origin is None:
        raise SystemExit(f'error: mmlinattn is not installed in {sys.executable}: pip install mmlinattn')
    package = Path(spec.origin).resolve().parent
    # the copy of an editable install without links (Windows) may be out of date
    checkout = package.parent if (package.parent / 'mmcv_ops').is_dir() else package / '.mim'
    return checkout / 'tools'


def main() -> None:
    """Run the tool named by the first argument with the others.

    Raises:
        SystemExit: The first argument is no tool, mmlinattn is not installed, or the tool exits.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ''
    if name in ('-h', '--help'):
        print(f'{USAGE}\ntools: {tools_folder()}')
        return
    if name not in TOOLS:
        print(f'error: command={name!r}: expected one of ({", ".join(TOOLS)})', file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[0]
    runpy.run_path(str(tools_folder() / TOOLS[name]), run_name='__main__')


if __name__ == '__main__':
    main()
