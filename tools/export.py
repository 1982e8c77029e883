#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a model as a graph and check the file: ``python tools/export.py CONFIG CHECKPOINT --format FORMAT --out FILE``.

Classifiers give scores, segmentors label maps, detectors boxes (ONNX, OpenVINO) or maps. See docs/deploy.md.
"""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import add_model_arguments


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Write a model as a graph and check the file against the model. Classifiers give scores, '
        'segmentors a label map, detectors boxes, scores, labels and masks (--format onnx or openvino) or '
        'the maps of their neck (other formats).'
    )
    add_model_arguments(parser, may_be_random=True)
    add = parser.add_argument
    add('--format', required=True, choices=['onnx', 'torch-export', 'torchscript', 'openvino'])
    add('--out', required=True, metavar='FILE', help='file to write')
    add('--shape', nargs=2, type=int, metavar=('H', 'W'), help='size of the image [size of the test pipeline]')
    add('--batch', type=int, default=1, help='images per batch [1]')
    add('--dynamic', action='store_true', help='accept any batch, and any size from 32x32 on')
    add('--neck', action='store_true', help='write the backbone and neck of a detector alone')
    return parser.parse_args()


if __name__ == '__main__':
    args = parse_args()  # before PyTorch is imported: --help answers at once

import mmlinattn  # noqa: F401, registers the backbones
from mmlinattn.tooling.export.cli import main

if __name__ == '__main__':
    main(args)
