# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Add a file beside the packages, for which pyproject.toml has no entry."""

from setuptools import setup
from setuptools.command.build_py import build_py

# run by Python at start-up: defines pkgutil.find_loader for MMEngine and MMCV, as Python 3.14 removed it
PTH = 'mmlinattn_mmcv_ops.pth'


class BuildWithPth(build_py):
    def run(self) -> None:
        super().run()
        self.copy_file(PTH, self.build_lib, preserve_mode=False)


setup(cmdclass={'build_py': BuildWithPth})
