#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Repeat a paper's ablation at small scale: train each variant defined in ``projects/studies``.

python tools/analysis_tools/ablation_study.py --study rala --out work_dirs/study_rala --max-minutes 25
"""

import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages

ROOT = Path(__file__).resolve().parents[2]
if __name__ == '__main__':
    if not (ROOT / 'projects' / 'studies').is_dir():
        sys.exit(f'error: {ROOT / "projects" / "studies"} is not there: studies run from a checkout')
    from projects.studies.arguments import parse_args

    args = parse_args()  # before PyTorch is imported: --help answers at once
    from projects.studies.main import main

    main(args)
