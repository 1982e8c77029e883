#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write docs/attentions.md: every attention, and what it costs in every host."""

import argparse
import sys
import warnings
from pathlib import Path

from mmengine.logging import MMLogger

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout serves without being installed

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn.analysis.attentions import page
from mmlinattn.apis.cli import check_out_file, one_line_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'attentions.md', help='[docs/attentions.md]')
    args = parser.parse_args()
    warnings.simplefilter('ignore')  # of model constructors, once a model
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with one_line_errors():
        check_out_file(args.out)
        text = page()
        args.out.write_text(text, encoding='utf-8')
    print(args.out)


if __name__ == '__main__':
    main()
