# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Side effects of ``import mmlinattn``."""

import subprocess
import sys

from helpers.config_helpers import ROOT


def test_importing_the_package_warns_of_nothing_and_leaves_upstream_alone():
    code = "import sys, mmlinattn; print([m for m in ('mmdet', 'mmseg', 'mmpretrain', 'pandas') if m in sys.modules])"
    # MMEngine calls `re.split(pattern, docstring, 1)`, deprecated in Python 3.13
    allowed = "ignore:'maxsplit' is passed as positional:DeprecationWarning"
    command = [sys.executable, '-W', 'error', '-W', allowed, '-c', code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() == '[]'
