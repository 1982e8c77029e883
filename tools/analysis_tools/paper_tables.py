#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""The papers' tables: published parameters and FLOPs beside those counted here."""

import argparse
import sys
import warnings
from pathlib import Path

from mmengine.logging import MMLogger
from mmengine.utils import ProgressBar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout serves without being installed

import mmlinattn  # noqa: F401  registers the backbones
from mmlinattn.analysis.paper_tables import TITLES, measure, page
from mmlinattn.analysis.published import read_rows
from mmlinattn.apis.cli import check_out_file, one_line_errors

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, help='Markdown file to write [print]')
    parser.add_argument('--task', nargs='+', choices=list(TITLES), default=list(TITLES), help='tables [all]')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.out:
        with one_line_errors():
            check_out_file(args.out)
    warnings.simplefilter('ignore')  # of model constructors, once a row
    MMLogger.get_instance('mmengine', log_level='ERROR')
    rows = [row for task in args.task for row in read_rows(task)]
    bar = ProgressBar(len(rows), file=sys.stderr)
    measured = []
    with one_line_errors():
        for row in rows:
            measured.append((row, measure(row, CONFIGS)))
            bar.update()
    print(file=sys.stderr)
    text = page(measured)
    if args.out:
        args.out.write_text(text, encoding='utf-8')
        print(args.out)
    else:
        print(text)


if __name__ == '__main__':
    main()
