#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Report parameters, multiply-adds of each part, and activation memory of the model of a config, without its
weights."""

import argparse
import runpy
import warnings
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / 'check_env.py'))  # finds the checkout and missing packages

from mmlinattn_console import add_config_arguments, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add_config_arguments(parser)
    parser.add_argument(
        '--shape',
        nargs=2,
        type=int,
        metavar=('H', 'W'),
        help='height and width [800 1280 for detectors, 512 2048 for segmentors, the test crop for classifiers]',
    )
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

from mmengine.logging import MMLogger

from mmlinattn.tooling.analysis.flops import KINDS, Cost, count_model
from mmlinattn.tooling.command_line import clean_end, one_line_errors, setup_errors
from mmlinattn.tooling.configs import read_with_options


def report(cost: Cost) -> str:
    """Format the cost as a text table: parameters in M, multiply-adds in G."""
    columns = ('part', 'params M', *(f'{kind} G' for kind in KINDS), 'all G')
    lines = []
    for part in cost.params:
        macs = [cost.macs[part, kind] / 1e9 for kind in KINDS]
        lines.append((part, cost.params[part] / 1e6, *macs, sum(macs)))
    totals = [cost.total_macs(kind) / 1e9 for kind in KINDS]
    lines.append(('total', cost.total_params / 1e6, *totals, sum(totals)))
    width = max(len(line[0]) for line in lines) + 2
    text = [f'image {cost.shape[0]} x {cost.shape[1]} (height x width), batch 1']
    text.append(columns[0].ljust(width) + ''.join(column.rjust(21) for column in columns[1:]))
    text += [line[0].ljust(width) + ''.join(f'{value:21.3f}' for value in line[1:]) for line in lines]
    text.append(f'peak activation memory (float32, inference, estimate): {cost.peak_bytes / 2**20:.0f} MiB')
    return '\n'.join([*text, *(f'note: {note}' for note in cost.notes)])


def main(args: argparse.Namespace) -> None:
    warnings.simplefilter('ignore')  # of model constructors
    MMLogger.get_instance('mmengine', log_level='ERROR')
    with clean_end(), one_line_errors(), setup_errors(args.config):
        print(report(count_model(read_with_options(args), args.shape)))


if __name__ == '__main__':
    main(args)
