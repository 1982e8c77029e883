#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Print one line for everything that this Python lacks to run mmlinattn, with the command to repair it.

    python tools/check_env.py
    python tools/check_env.py --report   # versions as well, to paste into an issue

The exit status is 1 if something is missing or broken. Tools run this file first: it puts the checkout on the import
path, and prints one line and exits if a package is missing.
"""

import runpy
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

if not sys.warnoptions:  # MMEngine imports it; setup_env.sh pins a setuptools that has it
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')

# beside tools/ in a checkout, around .mim/tools/ in a wheel
package = ROOT / 'mmlinattn' if (ROOT / 'mmlinattn').is_dir() else ROOT.parent
# by its path, since `import mmlinattn` needs the packages that may be missing
environment = runpy.run_path(str(package / 'tooling' / 'environment.py'))

if __name__ == '__main__':
    from mmlinattn_console import tool_parser

    parser = tool_parser(__doc__)
    parser.add_argument('--report', action='store_true', help='print the system and versions too')
    args = parser.parse_args()
    # without the checkout: mmlinattn must be installed
    sys.path = [folder for folder in sys.path if Path(folder or '.').resolve() not in (ROOT, ROOT / 'tools')]
    if args.report:
        print(*environment['report'](), sep='\n')
    lines = environment['check']()
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(bool(lines))
asks_help = not {'-h', '--help'}.isdisjoint(sys.argv)  # without PyTorch: its import takes seconds
if line := environment['missing']() or environment['refused']() or (not asks_help and environment['unusable']()):
    raise SystemExit(f'error: {line}')
