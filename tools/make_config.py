#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a config that trains a backbone of this project on a folder of your own images.

    python tools/make_config.py data/mine --task detection --backbone ravlt_t --out mine.py

DATA for detection: COCO, LabelMe or Label Studio JSON, VOC or CVAT XML, YOLO or KITTI text files, CSV. For
segmentation: images and segmentation masks. For classification: a folder of images for each class, or CSV. The config
inherits this project's, with your classes, image size, learning rate and schedule. It is tried on your images: a
training step, a prediction, and the time of the whole training. Annotations are also written in the formats of
OpenMMLab's data sets, beside the config, and labels.png shows six training images with their labels.
"""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('data', type=Path, metavar='DATA', help='folder, or one annotation file with its images beside')
    parser.add_argument('--task', required=True, choices=['detection', 'segmentation', 'classification'])
    parser.add_argument(
        '--backbone', required=True, help="backbone name in this project's configs: ravlt_t, inline_swin_s"
    )
    parser.add_argument('--out', required=True, type=Path, metavar='CONFIG.py', help='config file to write')
    parser.add_argument('--batch', type=int, help='images per step [detection 2, segmentation 4, classification 32]')
    parser.add_argument('--size', type=int, help="longer side of detectors' images, side of crops [as the images are]")
    parser.add_argument('--channels', type=int, help='of the images [as they are; grey ones of 8 bits are read as RGB]')
    parser.add_argument('--classes', nargs='+', metavar='NAME', help='class names in the order of their numbers')
    readings = parser.add_argument_group('options that choose between two readings of the data')
    readings.add_argument('--boxes', choices=['corners', 'sides', 'centre'], help='meaning of the numbers of a box')
    readings.add_argument('--units', choices=['pixels', 'shares'], help='unit of the numbers of a box')
    readings.add_argument('--images', type=Path, metavar='DIR', help='folder of the images')
    readings.add_argument('--labels', type=Path, metavar='FILE', help='file or folder of the labels')
    for split in ('train', 'val'):
        readings.add_argument(f'--{split}', type=Path, metavar='LIST', help=f'list, folder or label file of {split}')
    parser.add_argument('--scratch', action='store_true', help='start without the released weights')
    parser.add_argument('--overwrite', action='store_true', help='replace a config that was edited')
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

from mmlinattn.tooling.command_line import check_out_file, clean_end, console_command, one_line_errors
from mmlinattn.utils.errors import RunError


def main(args: argparse.Namespace) -> None:
    with clean_end(), one_line_errors():
        for name, value, least in (
            ('--batch', args.batch, 1),
            ('--size', args.size, 32),
            ('--channels', args.channels, 1),
        ):
            if value is not None and value < least:
                raise RunError(f'{name}={value}: expected at least {least}.')
        if args.out.suffix != '.py':
            raise RunError(f'--out={str(args.out)!r}: expected a name that ends with .py.')
        for name in ('boxes', 'units'):
            if getattr(args, name) and args.task != 'detection':
                raise RunError(f'--{name}={getattr(args, name)!r}: {args.task} has no boxes; leave it out.')
        from mmlinattn.tooling.own_data import ConfigArgs, make_config

        check_out_file(args.out)
        lines, trial = make_config(ConfigArgs(**vars(args)))
    print('\n'.join(f'  {line}' for line in lines))
    print(f'{args.out}: trained one step on your images (loss {trial.loss:.4g}) and predicted. Next:')
    print(f'{console_command()} train {args.out}')
    print(f'{console_command()} demo {args.out} work_dirs/{args.out.stem} IMAGE --out found.jpg')


if __name__ == '__main__':
    main(args)
