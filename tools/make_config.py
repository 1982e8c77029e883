#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a config that trains a backbone of this project on a folder of your own images.

    python tools/make_config.py data/mine --task detection --backbone ravlt_t --out mine.py

DATA for detection: COCO, LabelMe or Label Studio JSON, VOC or CVAT XML, YOLO or KITTI text files, CSV. For
segmentation: images and label images. For classification: a folder of images for each class, or CSV. The config
inherits this project's, with your classes, image size, learning rate and schedule. It is tried on your images: a
training step, a prediction, and the time of the whole training. Annotations are also written in the formats of
OpenMMLab's data sets, beside the config.
"""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn.tooling.command_line import check_out_file, clean_end, console_command, one_line_errors
from mmlinattn.utils.errors import RunError


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='folder, or one annotation file with its images beside')
    parser.add_argument('--task', required=True, choices=['detection', 'segmentation', 'classification'])
    parser.add_argument('--backbone', required=True, help="stem of this project's configs: ravlt_t, inline_swin_s")
    parser.add_argument('--out', required=True, type=Path, metavar='CONFIG.py', help='config file to write')
    parser.add_argument('--batch', type=int, help='images a step [detection 2, segmentation 4, classification 32]')
    parser.add_argument('--size', type=int, help="longer side of detectors' images, side of crops [as the images are]")
    parser.add_argument('--channels', type=int, help='of the images [as they are; grey ones of 8 bits are read as RGB]')
    parser.add_argument('--classes', nargs='+', metavar='NAME', help='of label images, in the order of their values')
    parser.add_argument('--scratch', action='store_true', help='start without the released weights')
    parser.add_argument('--overwrite', action='store_true', help='replace a config that was edited')
    return parser.parse_args()


def main() -> None:
    args = parse_args()
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
        if args.classes and args.task != 'segmentation':
            raise RunError(f'--classes is for label images: {args.task} has the names in the data.')
        from mmlinattn.tooling.own_data import ConfigArgs, make_config

        check_out_file(args.out)
        lines, trial = make_config(ConfigArgs(**vars(args)))
    print('\n'.join(f'  {line}' for line in lines))
    print(f'{args.out}: trained one step on your images (loss {trial.loss:.4g}) and predicted. Next:')
    print(f'{console_command()} train {args.out}')
    print(f'{console_command()} demo IMAGE {args.out} work_dirs/{args.out.stem} --out found.jpg')


if __name__ == '__main__':
    main()
