#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Says in one line each what this Python lacks to run mmlinattn, and which command mends it.

    python tools/check_env.py

exits with status 1 where it lacks something. Every tool imports this file first: it puts the checkout on the path, and
ends in one line where a package is missing.
"""

import argparse
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
# by its path, as `import mmlinattn` needs what may be missing
environment = runpy.run_path(str(package / 'tooling' / 'environment.py'))

if __name__ == '__main__':
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    # here the package has to be an installed one
    sys.path = [folder for folder in sys.path if Path(folder or '.').resolve() not in (ROOT, ROOT / 'tools')]
    lines = environment['check']()
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(bool(lines))
if line := environment['missing']():
    raise SystemExit(f'error: {line}')
