# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Convert a published checkpoint for strict loading into the model of CONFIG.

``python tools/convert_checkpoint.py SRC DST --config CONFIG``
"""

import argparse
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(
        'Convert a published checkpoint (a classifier, or an MMDetection 2.x or '
        "MMSegmentation 0.x model) for strict loading into CONFIG's model."
    )
    parser.add_argument('src', metavar='SRC', help='a file, a link, or mmlinattn://NAME')
    parser.add_argument('dst', metavar='DST', help='the file to write; never SRC itself')
    parser.add_argument('--config', required=True, help='config of the model DST is for')
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import mmlinattn  # noqa: F401, registers the backbones
from mmlinattn.checkpoints.convert import convert_checkpoint
from mmlinattn.checkpoints.fit import Fit, listed
from mmlinattn.tooling.command_line import clean_end, one_line_errors
from mmlinattn.tooling.configs import read_config


def explain(fit: Fit, source: str, config: str) -> str:
    lines = [f'{source} was not converted: it does not match the model of {config} key by key.']
    for title, keys in (
        ('missing in SRC', fit.missing),
        ('left over from SRC', fit.unexpected),
        ('of another shape', listed(fit.mismatched)),
        ('not real numbers', listed(fit.not_real)),
    ):
        if keys:
            lines += [f'{len(keys)} {title}:', *(f'  {key}' for key in keys)]
    if {key.split('.')[0] for key in fit.weights} == {'backbone'}:
        lines.append(
            'Hint: SRC holds the backbone alone. Training from it needs no conversion: '
            f"--cfg-options model.backbone.init_cfg.checkpoint='{source}'"
        )
    elif fit.mismatched and not fit.missing:
        lines.append('Hint: CONFIG has another number of classes or another size than SRC.')
    return '\n'.join(lines)


def main(args: argparse.Namespace) -> int:
    with clean_end(), one_line_errors():
        config = read_config(args.config).filename  # raises one line for an invalid one
        fit = convert_checkpoint(args.src, args.dst, config)
        for key in fit.ignored:
            print(f'dropped (derived, or a part that the model lacks): {key}')
        if not fit.is_complete:
            print(explain(fit, args.src, args.config), file=sys.stderr)
            return 1
        print(f'wrote {args.dst}: {len(fit.weights)} tensors')
    return 0


if __name__ == '__main__':
    sys.exit(main(args))
