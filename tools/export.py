#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a model as a graph and check the file: ``python tools/export.py CONFIG CHECKPOINT --format FORMAT --out FILE``.

Classifiers give scores, segmentors label maps, detectors boxes (ONNX, OpenVINO) or maps. See docs/deploy.md.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

import mmlinattn  # noqa: F401, registers the backbones
from mmlinattn.tooling.export.cli import main

if __name__ == '__main__':
    main()
