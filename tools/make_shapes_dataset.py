# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a synthetic data set of shapes in the layout of COCO, ADE20K or ImageNet.

Example: ``python tools/make_shapes_dataset.py data/shapes --format coco --num-train 800
--num-val 100``, then any config with ``data_root='data/shapes/'``.
"""

import argparse
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(
        'Write a synthetic data set of shapes, whole or not at all.',
        epilog='A data set with the same settings is kept; anything else in OUT is never touched.',
    )
    parser.add_argument('out', type=Path, metavar='OUT', help='folder to write: the data_root')
    parser.add_argument('--format', required=True, choices=('coco', 'ade', 'imagenet'))
    parser.add_argument('--num-train', required=True, type=int, help='images for training')
    parser.add_argument('--num-val', required=True, type=int, help='images for validation')
    parser.add_argument('--seed', type=int, default=0, help='default: %(default)s')
    parser.add_argument(
        '--size',
        type=int,
        nargs=2,
        default=(160, 160),
        metavar=('W', 'H'),
        help='width and height in pixels (default: 160 160)',
    )
    parser.add_argument(
        '--size-jitter',
        type=float,
        default=0.0,
        metavar='F',
        help='shorten each side by a random fraction of up to F <= 0.5 (default: 0, equal sizes)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()

    # imports of seconds, after the arguments are parsed
    from rich.console import Console
    from rich.progress import Progress

    from mmlinattn.tooling.command_line import clean_end, one_line_errors
    from mmlinattn.tooling.datasets import CLASSES, DatasetSpec, SettingError, write_dataset
    from mmlinattn.utils.errors import RunError

    with clean_end(), one_line_errors():
        try:
            spec = DatasetSpec(args.format, args.num_train, args.num_val, args.seed, tuple(args.size), args.size_jitter)
            with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
                task = progress.add_task(f'{args.format} shapes', total=args.num_train + args.num_val)
                written = write_dataset(args.out, spec, lambda: progress.advance(task))
        except SettingError as error:
            raise RunError(f'--{error}'.replace('_', '-')) from error
        except OSError as error:
            raise RunError(f'OUT {str(args.out)!r} cannot be written: {error}') from error
        state = 'wrote' if written else 'already there, unchanged:'
        counts = f'{args.num_train} training and {args.num_val} validation images'
        print(f'{state} {args.out} ({args.format}, {counts}, seed {args.seed})')
        print(f'classes: {CLASSES[args.format]}')


if __name__ == '__main__':
    main()
