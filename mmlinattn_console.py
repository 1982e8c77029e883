# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Run a tool of mmlinattn: ``mmlinattn train mine.py`` is ``python tools/train.py mine.py``.

A module beside the package: ``import mmlinattn`` fails if packages are missing, and the tools report those in one line.
"""

import argparse
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

TOOLS = {
    'config': 'make_config.py',
    'train': 'train.py',
    'test': 'test.py',
    'demo': 'demo.py',
    'export': 'export.py',
    'swap': 'swap_backbone.py',
    'convert': 'convert_checkpoint.py',
    'shapes': 'make_shapes_dataset.py',
    'flops': 'analysis_tools/get_flops.py',
    'attention': 'analysis_tools/inspect_attention.py',
    'study': 'analysis_tools/ablation_study.py',
    'images': 'analysis_tools/contact_sheet.py',
    'check': 'check_env.py',
}


def tools_folder() -> Path:
    """Return ``tools/`` of the checkout, or its copy in the installed package."""
    spec = find_spec('mmlinattn')
    if spec is None or spec.origin is None:
        raise SystemExit(f'error: mmlinattn is not installed in {sys.executable}: pip install mmlinattn')
    package = Path(spec.origin).resolve().parent
    # the copy of an editable install without links (Windows) may be out of date
    checkout = package.parent if (package.parent / 'mmcv_ops').is_dir() else package / '.mim'
    return checkout / 'tools'


def installed_version() -> str:
    """Return the version of the distribution, without importing the package."""
    try:
        return version('mmlinattn')
    except PackageNotFoundError:
        return 'unknown (not installed)'


def main() -> None:
    """Run the tool named by the first argument with the others.

    Raises:
        SystemExit: The first argument is no tool, mmlinattn is not installed, or the tool exits.
    """
    folder = tools_folder()
    parser = argparse.ArgumentParser(
        prog='mmlinattn',
        description='Run a tool of mmlinattn.',
        epilog=f'tools: {folder}',
        formatter_class=argparse.RawDescriptionHelpFormatter,  # a path is one line
    )
    parser.add_argument('--version', action='version', version=installed_version())
    parser.add_argument('command', choices=TOOLS, help='the tool to run')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help='arguments of the tool; --help lists them')
    args = parser.parse_args()
    tool = folder / TOOLS[args.command]
    sys.argv = [str(tool), *args.arguments]
    runpy.run_path(str(tool), run_name='__main__')


if __name__ == '__main__':
    main()
