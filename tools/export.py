#!/usr/bin/env python
# Copyright (c) The mmlinattn authors. Licensed under Apache-2.0.
"""Write a model as a graph and check the file: ``python tools/export.py CONFIG CHECKPOINT --format FORMAT --out FILE``.

Classifiers give scores, segmentors label maps, detectors boxes (ONNX, OpenVINO) or feature maps. See docs/deploy.md.
"""

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().with_name('check_env.py')))  # finds the checkout and missing packages

from mmlinattn_console import add_model_arguments, tool_parser


def parse_args() -> argparse.Namespace:
    parser = tool_parser(
        'Write a model as a graph and check the file against the model. Classifiers give scores, '
        'segmentors a label map, detectors boxes, scores, labels and masks (--format onnx or openvino) or '
        'the feature maps of their neck (other formats).'
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
from mmlinattn.checkpoints.loading import trained_model
from mmlinattn.tooling.command_line import check_out_file, clean_end, one_line_errors
from mmlinattn.tooling.configs import check_checkpoint, read_with_options
from mmlinattn.tooling.export import BOX_FORMATS, FORMATS, Sizes, export_model
from mmlinattn.tooling.images import image_channels, usual_size
from mmlinattn.utils.building import build_model
from mmlinattn.utils.errors import RunError


def main(args: argparse.Namespace) -> None:
    with clean_end(), one_line_errors():
        target, form = Path(args.out).expanduser(), FORMATS[args.format]
        is_of_another = target.suffix in {other.suffix for other in FORMATS.values()} - {form.suffix}
        # OpenVINO's weights are in a .bin beside the file
        if is_of_another or (args.format == 'openvino' and target.suffix != form.suffix):
            expected = f'a name that ends with {form.suffix} for --format {args.format}'
            raise RunError(f'--out={args.out!r}: expected {expected}.')
        form.check_installed()
        if args.checkpoint != 'none':
            args.checkpoint = check_checkpoint(args.checkpoint, 'checkpoint')
        check_out_file(target, args.config, args.checkpoint)
        cfg = read_with_options(args)
        height, width = args.shape or usual_size(cfg)
        sizes = Sizes(args.batch, height, width, args.dynamic, channels=image_channels(cfg))
        sizes.check()
        if args.checkpoint == 'none':
            model, meta = build_model(cfg), None
        else:
            model, meta = trained_model(cfg, args.checkpoint, name=args.config)
        export = export_model(model, cfg, target, args.format, sizes, meta, args.neck)
        size = sum(path.stat().st_size for path in export.files)
        files, outputs = ' and '.join(map(str, export.files)), ', '.join(export.metadata['outputs'])
        print(f'wrote {files}: {args.format}, {size / 2**20:.1f} MiB, outputs {outputs}')
        print(f'serves {export.metadata["serves"]}')
        if export.metadata['task'] == 'detector' and 'boxes' not in export.metadata['outputs'] and not args.neck:
            print(f'backbone and neck only; boxes: --format {BOX_FORMATS}')
        if export.metadata['windows']:
            print(f'one window of those that model.test_cfg tests in: {export.metadata["windows"]}')
        for shape, error in export.errors.items():
            print(f'deviation at {"x".join(map(str, shape))}: {error:.1e} {export.unit}')
        for shape, error in export.default_errors.items():
            at = 'x'.join(map(str, shape))
            print(f'deviation at {at} in {export.precision}: {error:.1e} {export.unit}')
        if export.default_errors:
            remedy = "compile_model(..., config={'INFERENCE_PRECISION_HINT': 'f32'})"
            default = f'{export.precision} is the default of {args.format} on this CPU'
            print(f'{default}; for the numbers of the model set {remedy}')


if __name__ == '__main__':
    main(args)
