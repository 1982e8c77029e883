# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Everything else stands in pyproject.toml, which has no entry for a file beside the packages."""

from setuptools import setup
from setuptools.command.build_py import build_py

# Python runs it at start-up: it defines pkgutil.find_loader, which MMEngine and MMCV call and Python 3.14 removed.
PTH = 'mmlinattn_mmcv_ops.pth'


class BuildWithPth(build_py):
    def run(self) -> None:
        super().run()
        self.copy_file(PTH, self.build_lib, preserve_mode=False)


setup(cmdclass={'build_py': BuildWithPth})
